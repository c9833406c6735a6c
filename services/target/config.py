"""Settings of the target. No torch, no grpc."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from common import limits
from common.address import Address, UnixAddress, parse_address
from common.config import PeerText, ServiceSettings
from common.errors import ConfigError


class TargetSettings(ServiceSettings):
    """Serve a language model: prefill, verify, sample, stream. With --drafter it decodes speculatively;
    the tokens are the same without."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TARGET_")
    EXAMPLE: ClassVar[str] = (
        "python -m services.target --model .models/SmolLM2-135M-Instruct "
        "--listen 127.0.0.1:50051 --drafter unix:/run/tandem/drafter.sock --metrics-port 9101"
    )

    model: str = Field(min_length=1, description="model directory, or Hugging Face id org/name")
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="name told to callers; default: the last part of --model",
    )
    drafter: PeerText | None = Field(
        None, description="the drafter's address, unix:/path or host:port; none means plain decoding"
    )
    draft_deadline_s: float = Field(
        0.5, gt=0, le=60, allow_inf_nan=False,
        description="seconds that a step waits for its drafts before it goes on without",
    )  # fmt: skip
    handoff: Literal["auto", "inline", "device"] = Field(
        "auto",
        description="how steps travel to the drafter: in GPU memory that both share (device), by messages "
        "(inline), or on a GPU the first if it can be had (auto)",
    )
    handoff_dir: str | None = Field(
        None, min_length=1,
        description="directory for the socket that passes GPU memory to the drafter, which must see it, too; "
        "default: that of the drafter's socket, else the one for temporary files",
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="element type of weights and KV; default: float32 on a cpu, else bfloat16"
    )
    row_independent: CliImplicitFlag[bool] = Field(
        False,
        description="on a GPU: let no token depend on the size of its batch, at some speed for large batches",
    )
    max_len: int | None = Field(
        None, ge=2, le=limits.CONTEXT_LEN_MAX,
        description="longest prompt plus output, in tokens; default: the model's or --kv-tokens",
    )  # fmt: skip
    kv_tokens: int | None = Field(
        None, ge=2, le=limits.KV_TOKENS_MAX,
        description="tokens that the KV pool holds, all requests together; default: 16384 on a cpu, else "
        "what fits in 0.85 of the memory that weights, buffers and graphs leave free, as the log says",
    )  # fmt: skip
    page_size: int = Field(16, ge=1, le=limits.PAGE_SIZE_MAX, description="tokens of a KV page")
    num_running_max: int = Field(
        32, ge=1, le=limits.REQUESTS_RUNNING_MAX, description="requests in a batch at most"
    )
    num_waiting_max: int = Field(
        limits.REQUESTS_WAITING_MAX, ge=1, le=limits.REQUESTS_WAITING_MAX,
        description="requests that may wait; more are refused",
    )  # fmt: skip
    extend_rows_max: int | None = Field(
        None, ge=1, le=limits.EXTEND_ROWS_MAX,
        description="prompt tokens computed in a step, so that decoding requests go on; default: 256 on a "
        "cpu, else 2048",
    )  # fmt: skip

    fronts: int | None = Field(
        None, ge=0, le=limits.FRONTS_MAX,
        description="processes that serve callers; 0 serves them in the process of the step loop; more "
        "than 1 need a TCP address. Default: 0 on a cpu, else 1",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_fronts(self) -> TargetSettings:
        if self.num_fronts > 1 and self.listen.startswith("unix:"):
            raise ConfigError(
                "fronts", "must be at most 1 on a unix socket, which fronts cannot share", given=self.fronts
            )
        return self

    @model_validator(mode="after")
    def _check_device(self) -> TargetSettings:
        if self.device == "cpu":
            if self.handoff == "device":
                raise ConfigError("handoff", "must be auto or inline with --device cpu", given=self.handoff)
            if self.row_independent:
                raise ConfigError("row_independent", "must be off with --device cpu", given=True)
        elif self.dtype == "float32":
            raise ConfigError("dtype", "must be bfloat16 with --device cuda", given=self.dtype)
        if self.handoff == "device" and self.drafter is None:
            raise ConfigError("handoff", "must be auto or inline without --drafter", given=self.handoff)
        return self

    def effective(self) -> dict[str, Any]:
        """All settings as they hold: what is logged. The KV pool of a GPU is sized later."""
        return {
            **self.model_dump(),
            "dtype": self.dtype_name,
            "extend_rows_max": self.num_extend_rows_max,
            "fronts": self.num_fronts,
        }

    @property
    def dtype_name(self) -> str:
        """`dtype`, resolved."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def num_extend_rows_max(self) -> int:
        """`extend_rows_max`, resolved."""
        # Whoever decodes waits for them: half a second for 256 rows of a 135M model on two cores.
        return self.extend_rows_max or (256 if self.device == "cpu" else 2048)

    @property
    def handoff_parent(self) -> Path:
        """`handoff_dir`, resolved."""
        if self.handoff_dir is not None:
            return Path(self.handoff_dir)
        address = self.drafter_address
        return Path(address.path).parent if isinstance(address, UnixAddress) else Path(tempfile.gettempdir())

    @property
    def num_fronts(self) -> int:
        """`fronts`, resolved."""
        return self.fronts if self.fronts is not None else int(self.device != "cpu")

    @property
    def drafter_address(self) -> Address | None:
        """`drafter`, parsed."""
        return parse_address(self.drafter, "drafter") if self.drafter else None
