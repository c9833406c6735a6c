"""No code of the product parses anything that can run code, read from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "services", "tools")

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
# Attributes of modules: both unpickle.
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
}


def find_banned(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if (node.module, "load") in BANNED_ATTRIBUTES and any(a.name == "load" for a in node.names):
                yield f"line {node.lineno}: from {node.module} import load"
        for name in names:
            if name.split(".")[0] in BANNED_MODULES:
                yield f"line {node.lineno}: import {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            yield f"line {node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in BANNED_ATTRIBUTES:
                yield f"line {node.lineno}: {node.value.id}.{node.attr}"
        # allow_pickle unpickles, trust_remote_code runs what a checkpoint brings.
        if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "trust_remote_code"}:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"line {node.value.lineno}: {node.arg}"


def product_files() -> list[Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 30, "the product was not found"
    return files


def test_the_product_holds_nothing_that_could_run_what_it_reads() -> None:
    found = [
        f"{path.relative_to(ROOT)} {problem}"
        for path in product_files()
        for problem in find_banned(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "import pickle as p", "from pickle import loads", "import torch\ntorch.load('x')",
     "from torch import load", "eval('1')", "exec('1')", "import marshal", "np.load('x', allow_pickle=True)",
     "Model.from_pretrained('x', trust_remote_code=True)", "def f():\n    from dill import loads"],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(source: str) -> None:
    assert list(find_banned(source))
