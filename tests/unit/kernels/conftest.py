"""Kernel tests on a CPU: Triton's interpreter, chosen when a kernel is decorated and asked again at launch.

The environment variable is set only while kernels are imported and while a test of this folder runs, so
that no other test and no child process inherits it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import numpy as np
import pytest
import torch

_SWITCH = "TRITON_INTERPRET"

if torch.cuda.is_available() or not sys.platform.startswith("linux"):
    # A process either compiles or interprets. Where there is a GPU, tests/gpu runs the same checks compiled;
    # Triton has no build for other systems.
    collect_ignore_glob = ["test_*.py"]
else:
    assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
    import common.kernels

    os.environ[_SWITCH] = "1"
    try:
        for module in pkgutil.iter_modules(common.kernels.__path__):
            importlib.import_module(f"common.kernels.{module.name}")
        # The one kernel that lives elsewhere: the bench's.
        importlib.import_module("tools.gpu_bench.read_speed")
    finally:
        del os.environ[_SWITCH]


@pytest.fixture(autouse=True)
def _interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_SWITCH, "1")


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products that add in order of the inner index.

    The interpreter multiplies with BLAS, where a row's bits depend on its place in the tile; tensor cores'
    do not. A test that compares bits needs products without that.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for inner in range(a.shape[1]):
            total += a[:, inner, None].astype(dtype) * b[None, inner].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", matmul)
