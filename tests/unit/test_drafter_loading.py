"""A drafter that finds no memory says which setting is too large."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from common.errors import ConfigError
from services.drafter import loading
from services.drafter.config import DrafterSettings
from services.drafter.loading import drafter_on_gpu, load_drafter
from tests.builders_drafter import build_draft_pair

NO_MEMORY = [torch.OutOfMemoryError("x"), RuntimeError("Triton Error [CUDA]: out of memory")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=71)


@pytest.fixture
def settings(checkpoints: tuple[Path, Path]) -> DrafterSettings:
    target_dir, draft_dir = checkpoints
    return DrafterSettings(
        model=str(draft_dir), target_model=str(target_dir), listen="unix:/run/d.sock", device="cuda"
    )


def failing(error: Exception) -> object:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights come to lie on no device, though the settings name one."""
    monkeypatch.setattr(loading, "find_device", lambda text, dtype: torch.device("meta"))


@pytest.mark.parametrize("error", NO_MEMORY)
def test_shared_weights_that_find_no_memory_are_the_devices_fault(
    settings: DrafterSettings, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_shared_weights", failing(error))
    with pytest.raises(ConfigError, match="^device: must have memory for the weights, got 'cuda'$"):
        load_drafter(settings)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_the_drafts_own_weights_too(
    settings: DrafterSettings, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_device", lambda text, dtype: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(loading, "load_shared_weights", lambda *_: (None, None))
    monkeypatch.setattr(loading.Draft, "load", failing(error))
    with pytest.raises(ConfigError, match="^device: must have memory for the weights, got 'cuda'$"):
        load_drafter(settings)


def test_what_goes_wrong_otherwise_is_not_called_memory(
    settings: DrafterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_shared_weights", failing(RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        load_drafter(settings)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_cache_that_finds_no_memory_is_too_large(
    settings: DrafterSettings, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What only a GPU needs is not imported here.
    parts = {
        "device_engine": SimpleNamespace(DeviceDraftEngine=failing(error)),
        "model.kernel_dflash": SimpleNamespace(KernelDFlash=lambda *_, **__: None),
        "ring_mapping": SimpleNamespace(CudaMappingDevice=None, RingMapping=None),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"services.drafter.{name}", part)
    cpu = DrafterSettings(**settings.model_dump() | {"device": "cpu"})
    shared, target = loading.load_shared_weights(Path(settings.target_model), torch.float32)
    draft = loading.Draft.load(Path(settings.model), shared, target)
    with pytest.raises(ConfigError, match="^kv_tokens: must fit the GPU's memory .*, got 65536$"):
        drafter_on_gpu(cpu, draft, shared, target)
