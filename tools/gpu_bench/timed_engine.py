"""The device engine as the step loop sees it, with the device's own times told to the log of steps."""

from __future__ import annotations

from services.target.core.device_launch import Results, Ticket
from services.target.core.lane_launch import LaneEngine
from tools.gpu_bench.step_log import StepLog


class TimedEngine:
    """Everything is the engine's; results are looked at on their way."""

    def __init__(self, engine: LaneEngine, log: StepLog) -> None:
        self._engine, self._log = engine, log
        self.prepare_drafting = engine.prepare_drafting
        self.join = engine.join
        self.set_drafts = engine.set_drafts
        self.launch = engine.launch
        self.captured_to_host = engine.captured_to_host
        self.zero_pages = engine.zero_pages

    def results_to_host(self, ticket: Ticket) -> Results:
        """See DeviceEngine.results_to_host."""
        results = self._engine.results_to_host(ticket)
        self._log.note_device_times(results.extend_s, results.verify_s)
        return results
