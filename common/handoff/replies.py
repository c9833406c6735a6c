"""What a reply of the drafter says, checked against the message that it answers. Knows the messages alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.handoff.transport import Outcome, PeerFault
from common.pb.tandem.v1 import drafter_pb2 as pb


@dataclass(frozen=True)
class Awaited:
    """A message that is not answered yet, and the sessions (id, epoch) that it names."""

    step_id: int
    sessions: frozenset[tuple[int, int]]


def read_outcomes(
    reply: pb.DraftResponse, awaited: Awaited, drafter_instance_id: str
) -> Iterator[tuple[tuple[int, int], Outcome, pb.SessionOutcome]]:
    """Session, outcome and the whole entry, for each session that the message named.

    What a reply says of others is ignored, and so are the callee's durations: they belong in a trace of the
    step, and there is none yet. PeerFault when it is no reply to the message, or leaves a session out.
    """
    if reply.step_id != awaited.step_id:
        raise PeerFault(f"step_id: must be {awaited.step_id}, got {reply.step_id}")
    if reply.drafter_instance_id != drafter_instance_id:
        raise PeerFault("drafter_instance_id: must be that of the handshake")
    unanswered = set(awaited.sessions)
    for said in reply.outcomes:
        key = (said.session_id, said.epoch)
        if key not in unanswered:
            continue
        unanswered.remove(key)
        yield key, _outcome(said.outcome), said
    if unanswered:
        raise PeerFault(f"outcomes: {len(unanswered)} sessions of the message are missing")


def _outcome(number: int) -> Outcome:
    try:
        return Outcome(number)
    except ValueError:
        raise PeerFault(f"outcome: must be a known one, got {number}") from None
