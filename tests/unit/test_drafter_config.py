"""The drafter's settings where they depend on the device."""

from __future__ import annotations

import pytest

from common.config import load_settings
from common.errors import ConfigError
from services.drafter.config import DrafterSettings

NEEDED = ["--model", "d", "--target-model", "t", "--listen", "unix:/run/d.sock"]


def load(*flags: str) -> DrafterSettings:
    return load_settings(DrafterSettings, "services.drafter", [*NEEDED, *flags])


def test_the_element_type_follows_the_device_unless_it_is_given() -> None:
    assert load().dtype_name == "float32"
    assert load("--dtype", "bfloat16").dtype_name == "bfloat16"
    assert load("--device", "cuda:1").dtype_name == "bfloat16"
    with pytest.raises(ConfigError, match="^dtype: must be bfloat16 with --device cuda, got 'float32'$"):
        load("--device", "cuda", "--dtype", "float32")


@pytest.mark.parametrize(
    ("device", "page_size", "least"),
    # A row of context and a block of 16 make 17 rows; on a GPU a block of states comes in between: 33.
    [("cpu", 1, 17), ("cpu", 16, 32), ("cpu", 64, 64), ("cuda", 1, 33), ("cuda", 16, 48), ("cuda", 64, 64)],
)
def test_a_pool_in_which_no_session_could_draft_is_refused(device: str, page_size: int, least: int) -> None:
    flags = ("--device", device, "--page-size", str(page_size), "--kv-tokens")
    load(*flags, str(least)).check_capacity(16)
    with pytest.raises(ConfigError, match=rf"^kv_tokens: must be at least {least} \(one session\), got"):
        load(*flags, str(least - 1)).check_capacity(16)
