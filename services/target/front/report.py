"""What a front measures on its way to the core, whose page shows it. Knows no gRPC and no socket."""

from __future__ import annotations

from collections.abc import Callable

from common import limits
from common.pb.tandem.v1 import core_pb2


class FrontReports:
    """Collects; `report` sends, as do too many entries. The last quarter of a second is lost with a front
    that is killed."""

    def __init__(self, tell: Callable[[core_pb2.FrontReport], None]) -> None:
        self._tell = tell
        self._next = core_pb2.FrontReport()

    def observe_server_call(self, method: str, status: str, seconds: float) -> None:
        """A call that this front answered; `status` is the name of a gRPC status code."""
        self._next.ended_calls.append(core_pb2.EndedCall(method=method, status=status, seconds=seconds))
        self._send_if_full()

    def observe_rejected(self, reason: str) -> None:
        """A request was refused or dropped; see services.target.metrics.REJECTIONS."""
        self._next.rejected.append(reason)
        self._send_if_full()

    def report(self, event_loop_lag_s: float) -> None:
        """Send what there is, be it nothing but the lag: the core takes silence for a front that hangs."""
        self._next.event_loop_lag_s = event_loop_lag_s
        self._tell(self._next)
        self._next = core_pb2.FrontReport(event_loop_lag_s=event_loop_lag_s)

    def _send_if_full(self) -> None:
        if len(self._next.ended_calls) + len(self._next.rejected) >= limits.REPORT_ENTRIES_MAX:
            self.report(self._next.event_loop_lag_s)
