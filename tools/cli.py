"""The `tandem` command: which sub-commands there are and where each one lives.

A sub-command's module is imported only when it runs, so that `tandem --help` answers at once. This
module must not import torch, grpc or any service.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from common.errors import TandemError


class SubCommand(NamedTuple):
    """Where a sub-command lives: a module that has a `typer.Typer` named `app`."""

    module: str
    summary: str


SUB_COMMANDS = {
    "demo": SubCommand("tools.demo", "Watch the target and the drafter answer, beside plain decoding."),
    "bench": SubCommand("tools.bench", "Measure plain, drafted and a peer's decoding side by side."),
    "convert": SubCommand("tools.convert", "Turn a GGUF file into a safetensors model directory."),
    "train": SubCommand("tools.train.command", "Train a draft for a target's model."),
}


class LazyGroup(TyperGroup):
    """A group that lists its commands from SUB_COMMANDS and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the sub-commands, in the order of the help page."""
        return list(SUB_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with name and summary for the help page; None for an unknown name."""
        known = SUB_COMMANDS.get(cmd_name)
        return known and TyperCommand(cmd_name, help=known.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command behind the first argument; its module is imported here."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None or stand_in is None:
            return name, stand_in, rest
        module = importlib.import_module(SUB_COMMANDS[name].module)
        command = typer.main.get_command(module.app)
        command.name = name
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tandem: DFlash speculative decoding by two services that ride together.",
)


@app.callback()
def _root() -> None:
    """Hold the group's place; the sub-commands do the work."""


def main() -> None:
    """Entry point of the console script. An error meant for a person is one line and exit status 2."""
    try:
        app()
    except TandemError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(2)


if __name__ == "__main__":
    main()
