"""The `tandem` command itself: its help is instant, and an error meant for a person is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cli import SUB_COMMANDS

ROOT = Path(__file__).parents[2]


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_lists_every_sub_command() -> None:
    done = tandem("--help")
    assert done.returncode == 0
    for name, command in SUB_COMMANDS.items():
        assert name in done.stdout and command.summary in done.stdout


def test_help_imports_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, tools.cli\n"
        "try: tools.cli.app(['--help'])\n"
        "except SystemExit: print({'torch', 'grpc', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_explains_itself(name: str) -> None:
    done = tandem(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"{name} [OPTIONS]" in done.stdout


def test_an_error_meant_for_a_person_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = tandem("convert", "absent.gguf", "--out", str(tmp_path / "[out]"))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["error: gguf: must be a file, got 'absent.gguf'"]


def test_an_unknown_sub_command_is_refused() -> None:
    done = tandem("fly")
    assert done.returncode == 2 and "fly" in done.stderr
