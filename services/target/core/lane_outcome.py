"""What a launch did to its requests, and the report of it. No torch."""

from __future__ import annotations

from typing import NamedTuple

from services.target.core.device_launch import Results
from services.target.core.draft_source import PlainReason
from services.target.core.lane_launch import Launched
from services.target.core.report import StepReport
from services.target.core.request import Event, Phase, Request
from services.target.core.verification import Verified


class Outcome(NamedTuple):
    """What a launch did to one request; verified is None when nothing was chosen, or nothing that counts.
    num_drafts: draft tokens that it verified."""

    request: Request
    verified: Verified | None = None
    num_drafts: int = 0
    events: list[Event] | tuple[()] = ()


def sessions_of_invalid_drafts(launched: Launched, results: Results) -> list[int]:
    """Those whose drafts were not all ids of the vocabulary."""
    if not results.num_clamped.any():
        return []
    decodes, num_clamped = launched.plan.decodes, results.num_clamped.tolist()
    return [ride.request.session_id for ride, num in zip(decodes, num_clamped, strict=True) if num]


def report_of(launched: Launched, outcomes: list[Outcome], results: Results) -> StepReport:
    """The step without its times. outcomes: of the extends, then of the decodes."""
    plan = launched.plan
    num_extends = len(plan.extends)
    num_rows = sum(extend.num_tokens for extend in plan.extends) + len(plan.decodes) * launched.num_rows_each
    report = StepReport(num_rows, len(outcomes))
    report.captured_bytes = num_rows * launched.captured_row_bytes
    report.extends = num_extends > 0
    for extend in plan.extends:
        prompt_len = len(extend.ride.request.prompt)
        report.num_prompt_tokens += max(0, min(extend.stop, prompt_len) - extend.start)
    report.num_generated_tokens = sum(len(o.verified.tokens) for o in outcomes if o.verified)
    num_clamped = results.num_clamped.tolist()
    for outcome, reason, is_invalid in zip(outcomes[num_extends:], launched.plain, num_clamped, strict=True):
        verified = outcome.verified
        if verified is None:
            if outcome.num_drafts and outcome.request.phase is not Phase.FINISHED:
                report.plain.append(PlainReason.NON_FINITE)
        elif outcome.num_drafts and is_invalid:
            report.plain.append(PlainReason.INVALID_DRAFT)
        elif outcome.num_drafts:
            report.verifies.append((outcome.num_drafts, verified.num_accepted))
        elif reason is not None:
            report.plain.append(reason)
    return report
