"""One message, done by the step runner over a tiny draft: what becomes of each session it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.handoff.transport import Block, Close, Extend, Open, Outcome, Step
from services.drafter.session import SessionKey
from services.drafter.step import StepReply
from tests.builders_drafter import Drafter, build_draft_pair, load_drafter, rows_in_order


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=11)


@pytest.fixture
def drafter(checkpoints: tuple[Path, Path]) -> Drafter:
    return load_drafter(*checkpoints, num_pages=12, page_size=4)


def rows(drafter: Drafter, count: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, drafter.captured_width, generator=torch.Generator().manual_seed(seed))


def run(
    drafter: Drafter, *, captured: torch.Tensor | None = None, with_blocks: bool = True, **step: Any
) -> StepReply:
    return drafter.runner.run("target", Step(**step), captured, with_blocks=with_blocks)


def outcomes(reply: StepReply) -> dict[int, Outcome]:
    return {verdict.session_id: verdict.outcome for verdict in reply.verdicts}


def test_a_message_opens_extends_and_drafts_in_one_go(drafter: Drafter) -> None:
    reply = run(
        drafter,
        opens=[Open(1, 0, 0), Open(2, 0, 0)],
        extends=rows_in_order((2, 0, 0, 3), (1, 0, 0, 5)),
        captured=rows(drafter, 8),
        blocks=[Block(1, 0, 5, 7), Block(2, 0, 3, 9)],
    )
    assert outcomes(reply) == {1: Outcome.OK, 2: Outcome.OK}
    assert {v.session_id: (v.context_len, v.draft_row) for v in reply.verdicts} == {1: (5, 0), 2: (3, 1)}
    assert reply.drafts is not None
    assert reply.drafts.shape == (2, 3) and reply.drafts.dtype is torch.int32
    assert reply.num_context_rows == 8


def test_a_drafts_row_is_the_same_alone_and_in_company(drafter: Drafter) -> None:
    both = rows(drafter, 9)
    run(drafter, opens=[Open(1, 0, 0)], extends=rows_in_order((1, 0, 0, 5)), captured=both[:5])
    alone = run(drafter, blocks=[Block(1, 0, 5, 7)]).drafts
    together = run(
        drafter, opens=[Open(2, 0, 0)], extends=rows_in_order((2, 0, 0, 4)), captured=both[5:],
        blocks=[Block(2, 0, 4, 9), Block(1, 0, 5, 7)],
    ).drafts  # fmt: skip
    assert alone is not None and together is not None
    assert alone[0].tolist() == together[1].tolist()


def test_rows_are_those_that_an_extend_names_wherever_they_lie(drafter: Drafter) -> None:
    captured = rows(drafter, 9)
    run(drafter, opens=[Open(1, 0, 0)], extends=[Extend(1, 0, 0, 0, 5)], captured=captured[2:7])
    expected = run(drafter, blocks=[Block(1, 0, 5, 7)]).drafts
    reply = run(
        drafter,
        opens=[Open(2, 0, 0), Open(3, 0, 0)],
        extends=[Extend(2, 0, 0, 2, 7), Extend(3, 0, 0, 0, 2)],
        captured=captured,
        blocks=[Block(2, 0, 5, 7)],
    )
    assert expected is not None and reply.drafts is not None
    assert reply.drafts.tolist() == expected.tolist()


def test_a_session_closed_and_opened_in_one_message_begins_anew(drafter: Drafter) -> None:
    run(drafter, opens=[Open(1, 0, 0)], extends=rows_in_order((1, 0, 0, 5)), captured=rows(drafter, 5))
    reply = run(drafter, closes=[Close(1, 0)], opens=[Open(1, 0, 0)])
    assert [(v.outcome, v.context_len) for v in reply.verdicts] == [(Outcome.OK, 0)]


def test_a_closed_session_has_no_verdict(drafter: Drafter) -> None:
    run(drafter, opens=[Open(1, 0, 0)])
    assert run(drafter, closes=[Close(1, 0), Close(99, 0)]).verdicts == []
    assert drafter.table.num_sessions == 0


def test_a_failed_append_costs_its_session_the_block_and_no_one_else(drafter: Drafter) -> None:
    captured = rows(drafter, 6)
    run(drafter, opens=[Open(1, 0, 0), Open(2, 0, 0)])
    reply = run(
        drafter,
        extends=rows_in_order((1, 0, 2, 3), (2, 0, 0, 3)),
        captured=captured,
        blocks=[Block(1, 0, 5, 7), Block(2, 0, 3, 7)],
    )
    assert outcomes(reply) == {1: Outcome.NEEDS_RESYNC, 2: Outcome.OK}
    # The second session got its own rows, not the first one's.
    run(drafter, opens=[Open(3, 0, 0)], extends=rows_in_order((3, 0, 0, 3)), captured=captured[3:])
    expected = run(drafter, blocks=[Block(3, 0, 3, 7)]).drafts
    assert reply.drafts is not None and expected is not None
    assert reply.drafts.tolist() == expected.tolist()


def test_an_anchor_outside_the_vocabulary_is_an_invalid_field(drafter: Drafter) -> None:
    reply = run(
        drafter,
        opens=[Open(1, 0, 0), Open(2, 0, 0)],
        blocks=[Block(1, 0, 0, drafter.vocab_rows), Block(2, 0, 0, drafter.vocab_rows - 1)],
    )
    assert outcomes(reply) == {1: Outcome.INVALID_FIELD, 2: Outcome.OK}
    assert reply.drafts is not None and len(reply.drafts) == 1


@pytest.mark.parametrize(
    "twice",
    [
        {"opens": [Open(1, 0, 0), Open(1, 0, 0)]},
        {"extends": rows_in_order((1, 0, 0, 2), (1, 0, 1, 2))},
        {"blocks": [Block(1, 0, 0, 7), Block(1, 0, 0, 8)]},
        {"opens": [Open(1, 0, 0)], "blocks": [Block(1, 1, 0, 7)]},
    ],
    ids=["opens", "extends", "blocks", "epochs"],
)
def test_a_session_named_twice_is_an_invalid_field_and_untouched(
    drafter: Drafter, twice: dict[str, Any]
) -> None:
    num_rows = sum(extend.num_rows for extend in twice.get("extends", []))
    reply = run(drafter, captured=rows(drafter, num_rows) if num_rows else None, **twice)
    assert outcomes(reply) == {1: Outcome.INVALID_FIELD}
    assert drafter.table.num_sessions == 0


def test_an_extend_without_rows_is_an_invalid_field(drafter: Drafter) -> None:
    reply = run(drafter, opens=[Open(1, 0, 0)], extends=rows_in_order((1, 0, 0, 0)))
    assert outcomes(reply) == {1: Outcome.INVALID_FIELD}


def test_when_newer_messages_wait_context_is_appended_and_the_block_is_not(drafter: Drafter) -> None:
    reply = run(
        drafter,
        with_blocks=False,
        opens=[Open(1, 0, 0)],
        extends=rows_in_order((1, 0, 0, 5)),
        captured=rows(drafter, 5),
        blocks=[Block(1, 0, 5, 7)],
    )
    assert [(v.outcome, v.context_len, v.draft_row) for v in reply.verdicts] == [(Outcome.BUSY, 5, None)]
    assert reply.drafts is None
    assert outcomes(run(drafter, blocks=[Block(1, 0, 5, 7)])) == {1: Outcome.OK}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_rows_that_are_not_finite_close_their_session_alone_and_leave_clean_pages(
    drafter: Drafter, poison: float
) -> None:
    captured = rows(drafter, 9)
    captured[6] = poison
    reply = run(
        drafter,
        opens=[Open(1, 0, 0), Open(2, 0, 0)],
        extends=rows_in_order((1, 0, 0, 4), (2, 0, 0, 5)),
        captured=captured,
        blocks=[Block(1, 0, 4, 7), Block(2, 0, 5, 7)],
    )
    assert outcomes(reply) == {1: Outcome.OK, 2: Outcome.NON_FINITE}
    assert SessionKey("target", 2) not in drafter.table
    assert bool(torch.isfinite(drafter.engine._kv).all())
    # Its pages serve the next session as if nothing had been.
    run(drafter, opens=[Open(3, 0, 0)], extends=rows_in_order((3, 0, 0, 4)), captured=captured[:4])
    third = run(drafter, blocks=[Block(3, 0, 4, 7)]).drafts
    assert reply.drafts is not None and third is not None
    assert third.tolist() == reply.drafts.tolist()


def test_free_pages_full_of_nan_change_nothing(drafter: Drafter) -> None:
    captured = rows(drafter, 7)
    step: dict[str, Any] = {
        "opens": [Open(1, 0, 0)], "extends": rows_in_order((1, 0, 0, 7)), "captured": captured,
        "blocks": [Block(1, 0, 7, 7)],
    }  # fmt: skip
    clean = run(drafter, **step).drafts
    run(drafter, closes=[Close(1, 0)])
    drafter.engine._kv.fill_(float("nan"))
    again = run(drafter, **step).drafts
    assert clean is not None and again is not None
    assert again.tolist() == clean.tolist()


def test_a_context_over_scattered_pages_drafts_the_same_as_over_neighbouring_ones(drafter: Drafter) -> None:
    captured = rows(drafter, 14)
    run(drafter, opens=[Open(1, 0, 0)], extends=rows_in_order((1, 0, 0, 14)), captured=captured)
    neighbours = run(drafter, blocks=[Block(1, 0, 14, 7)]).drafts
    run(drafter, closes=[Close(1, 0)], opens=[Open(2, 0, 0), Open(3, 0, 0)])
    for position in range(0, 14, 2):
        piece = captured[position : position + 2]
        run(
            drafter, extends=rows_in_order((2, 0, position, 2), (3, 0, position, 2)),
            captured=torch.cat([piece, piece]),
        )  # fmt: skip
    scattered = run(drafter, blocks=[Block(2, 0, 14, 7), Block(3, 0, 14, 7)]).drafts
    assert neighbours is not None and scattered is not None
    assert scattered.tolist() == neighbours.tolist() * 2
