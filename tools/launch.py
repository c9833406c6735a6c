"""What demo and bench share before they measure: checkpoints, services, the link between them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError
from common.model_dir import resolve_model_dir
from common.pb.tandem.v1 import target_pb2
from tools.local_stack import LocalStack
from tools.target_client import TargetClient

DEFAULT_MODEL = ".models/SmolLM2-135M-Instruct"
DEFAULT_DRAFT = "models/SmolLM2-135M-Instruct-DFlash-b8"
# Both services serve by then; what remains is a handshake, which is probed for each second.
_DRAFTER_UP_DEADLINE_S = 10.0


def existing_dirs(model: str, draft: str) -> tuple[Path, Path]:
    """Both checkpoints' directories; ConfigError names the field that is wrong and what makes the default."""
    for field, given, default, remedy in (
        ("model", model, DEFAULT_MODEL, "`make setup` makes it"),
        ("draft", draft, DEFAULT_DRAFT, "`tandem train` makes one"),
    ):
        if given == default and not Path(given).is_dir():
            raise ConfigError(field, f"is not there; {remedy}, --{field} names another", given=given)
    return resolve_model_dir(model, field="model"), resolve_model_dir(draft, field="draft")


def check_json_path(path: Path | None) -> None:
    """Refuse a place for the results before minutes are spent on them."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError("json", "must be in a folder that exists", given=str(path))


def start_stack(
    console: Console, model_dir: Path, draft_dir: Path, service_flags: Sequence[str] = ()
) -> LocalStack:
    """A stack that says on the console what it waits for; service_flags go to both services."""
    announced: set[str] = set()

    def announce(name: str, seconds: float) -> None:
        if name not in announced:
            announced.add(name)
            console.print(f"starting the {name} …")

    return LocalStack(
        model_dir, draft_dir, target_flags=service_flags, drafter_flags=service_flags, on_wait=announce
    )


def wait_for_drafter(client: TargetClient) -> target_pb2.GetServerInfoResponse:
    """The target's facts once the link to the drafter is up or cannot come up."""
    deadline = time.monotonic() + _DRAFTER_UP_DEADLINE_S
    while True:
        facts = client.server_facts()
        if facts.drafter_state != target_pb2.DRAFTER_STATE_DOWN or time.monotonic() > deadline:
            return facts
        time.sleep(0.05)


def report_drafter(console: Console, facts: target_pb2.GetServerInfoResponse) -> None:
    """Say whether drafts can be expected."""
    if facts.drafter_state == target_pb2.DRAFTER_STATE_UP:
        console.print(f"target and drafter are joined: draft blocks of {facts.block_size} rows")
        return
    state = target_pb2.DrafterState.Name(facts.drafter_state).removeprefix("DRAFTER_STATE_").lower()
    console.print(f"[bold yellow]the drafter is {state}: everything below is plain decoding[/]")
    for line in facts.contract_mismatches:
        console.print(Text(f"  {line}"))


def leave_on_sigterm() -> None:
    """Make SIGTERM an exception, so that the stack is stopped on the way out."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
