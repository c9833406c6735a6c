"""What carries messages to the drafter, as a transport sees it. Knows no grpc."""

from __future__ import annotations

from typing import Protocol

from common.pb.tandem.v1 import drafter_pb2 as pb


class Pipe(Protocol):
    """Carries messages to one life of a drafter and its replies back, in order."""

    def send(self, requests: list[pb.DraftRequest]) -> bool:
        """Queue all messages or, when they do not fit the bounded queue, none (False). Never waits.
        Raises PeerLost."""

    def receive(self, deadline: float) -> pb.DraftResponse | None:
        """The next reply; None when none came by `deadline` (monotonic seconds). Raises PeerLost."""
