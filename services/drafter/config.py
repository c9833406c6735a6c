"""Settings of the drafter service. No torch, no grpc."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from common import limits
from common.config import ServiceSettings
from common.errors import ConfigError


class DrafterSettings(ServiceSettings):
    """Drafts blocks of tokens for a target from its captured hidden states."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")
    EXAMPLE: ClassVar[str] = (
        "python -m services.drafter --model models/SmolLM2-135M-Instruct-DFlash-b8 "
        "--target-model .models/SmolLM2-135M-Instruct --listen unix:/run/tandem/drafter.sock"
    )

    model: str = Field(description="draft checkpoint: a directory or a Hugging Face id")
    target_model: str = Field(
        description="the target's checkpoint, for its embedding and lm_head: a directory or a Hugging Face id"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="element type of weights, KV and captured hidden states, the same as the target's; "
        "default: float32 on a cpu, else bfloat16",
    )
    num_sessions_max: int = Field(
        64, ge=1, le=limits.SESSIONS_MAX, description="sessions that may be open at once"
    )
    kv_tokens: int = Field(
        65536, ge=1, le=limits.KV_TOKENS_MAX,
        description="tokens of context that all sessions together can hold, draft blocks included",
    )  # fmt: skip
    page_size: int = Field(64, ge=1, le=limits.PAGE_SIZE_MAX, description="tokens in a page of the KV cache")
    extend_rows_max: int = Field(
        2048, ge=1, le=limits.EXTEND_ROWS_MAX,
        description="prompt tokens that a target on the same GPU may hand over in a step",
    )  # fmt: skip
    lease_s: float = Field(
        limits.SESSION_LEASE_S, gt=0, le=3600, allow_inf_nan=False,
        description="seconds after which a session that no message named is closed",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_device(self) -> DrafterSettings:
        if self.device != "cpu" and self.dtype == "float32":
            raise ConfigError("dtype", "must be bfloat16 with --device cuda", given=self.dtype)
        return self

    @property
    def dtype_name(self) -> str:
        """`dtype`, resolved."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def effective(self) -> dict[str, Any]:
        """All settings as they hold: what is logged."""
        return {**self.model_dump(), "dtype": self.dtype_name}

    @property
    def served_name(self) -> str:
        """What metrics call the model: the last part of its directory or id."""
        return PurePath(self.model).name

    def check_capacity(self, block_size: int) -> None:
        """ConfigError unless at least one session could draft: a row of context and a block; on a GPU, where
        a step stores a whole block of states before it is known how many are context, another block."""
        num_rows = 1 + block_size * (1 if self.device == "cpu" else 2)
        least = -(-num_rows // self.page_size) * self.page_size
        if self.kv_tokens < least:
            raise ConfigError("kv_tokens", f"must be at least {least} (one session)", given=self.kv_tokens)
