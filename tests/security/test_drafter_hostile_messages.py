"""Whatever a draft message holds: every session named is answered, nothing breaks, no one else notices.

Property-based, at the point where bytes have become a message. The innocent is a session of the same
drafter; its draft must not change by a single token.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import limits, wire
from common.errors import InvalidRequest
from common.metrics import Metrics
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import tensor_pb2
from services.drafter.desk import DrafterDesk, DrafterFacts
from services.drafter.metrics import DrafterMetrics
from tests.builders_drafter import Drafter, build_draft_pair, load_drafter
from tests.drafter_rig import drafts_of, outcomes_of

# The hostile target is the innocent's own or another one, and uses the innocent's number too: only an
# epoch that the innocent never had keeps them apart there.
HOSTILE_EPOCH = 5
INNOCENT = 1
CONTEXT_LEN = 9


class Innocent:
    """A session whose draft is known."""

    def __init__(self, drafter: Drafter, desk: DrafterDesk, width: int) -> None:
        self.drafter, self.desk, self.width = drafter, desk, width
        captured = torch.randn(CONTEXT_LEN, width, generator=torch.Generator().manual_seed(1))
        self.expected = drafts_of(self.answer(pb.DraftRequest(
            target_instance_id="innocent",
            opens=[pb.OpenSession(session_id=INNOCENT, epoch=9)],
            extends=[pb.ExtendSession(session_id=INNOCENT, epoch=9, num_rows=CONTEXT_LEN)],
            captured=wire.encode_tensor(captured),
            drafts=[self.block()],
        )))  # fmt: skip
        assert len(self.expected) == 1

    def block(self) -> pb.DraftBlock:
        return pb.DraftBlock(session_id=INNOCENT, epoch=9, position=CONTEXT_LEN, anchor=7)

    def answer(self, request: pb.DraftRequest) -> pb.DraftResponse:
        return self.desk.answer(request, time.monotonic(), lambda: False)

    def check(self) -> None:
        """Nothing of the innocent changed, and no page is lost."""
        reply = self.answer(pb.DraftRequest(target_instance_id="innocent", drafts=[self.block()]))
        assert outcomes_of(reply) == {INNOCENT: "OK"}
        assert drafts_of(reply) == self.expected
        assert self.drafter.table.num_pages_unaccounted == 0
        assert bool(torch.isfinite(self.drafter.engine._kv).all())


@pytest.fixture(scope="module")
def innocent(tmp_path_factory: pytest.TempPathFactory) -> Innocent:
    target_dir, draft_dir = build_draft_pair(tmp_path_factory.mktemp("pair"), seed=31)
    drafter = load_drafter(target_dir, draft_dir, num_pages=24, page_size=4, num_sessions_max=6)
    model = drafter.model
    facts = DrafterFacts("drafter", drafter.target, model.contract, model.dtype, 6, 30.0)
    metrics = DrafterMetrics(Metrics("tandem_drafter", "tiny"), 1, 3)
    desk = DrafterDesk(facts, drafter.table, drafter.runner, metrics)
    return Innocent(drafter, desk, drafter.captured_width)


u32 = st.one_of(st.integers(0, 12), st.sampled_from([191, 192, 256, 2**31 - 1, 2**31, 2**32 - 1]))
session_ids = st.one_of(st.integers(0, 4), st.just(2**64 - 1))
epochs = st.one_of(st.integers(0, HOSTILE_EPOCH), st.just(2**32 - 1))
opens = st.builds(
    pb.OpenSession, session_id=session_ids, epoch=st.integers(0, HOSTILE_EPOCH), start_position=u32
)
extends = st.builds(pb.ExtendSession, session_id=session_ids, epoch=epochs, position=u32, num_rows=u32)
drafts = st.builds(pb.DraftBlock, session_id=session_ids, epoch=epochs, position=u32, anchor=u32)
closes = st.builds(pb.CloseSession, session_id=session_ids, epoch=st.integers(0, HOSTILE_EPOCH))
dimensions = st.one_of(st.integers(0, 100), st.sampled_from([2**31, 2**32, 2**40, 2**63, 2**64 - 1]))
tensors = st.builds(
    tensor_pb2.Tensor,
    dtype=st.integers(0, 6),
    shape=st.lists(dimensions, max_size=6),
    content=st.one_of(st.binary(max_size=600), st.just(b"\0" * 4096)),
)
floats = st.one_of(
    st.floats(width=32), st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, 1e-45])
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["innocent", "hostile"]),
    closes=st.lists(closes, max_size=3),
    opens=st.lists(opens, max_size=4),
    extends=st.lists(extends, max_size=4),
    drafts=st.lists(drafts, max_size=4),
    captured=st.one_of(st.none(), tensors),
)
def test_any_fields_at_all(
    innocent: Innocent,
    name: str,
    closes: list[pb.CloseSession],
    opens: list[pb.OpenSession],
    extends: list[pb.ExtendSession],
    drafts: list[pb.DraftBlock],
    captured: tensor_pb2.Tensor | None,
) -> None:
    request = pb.DraftRequest(
        step_id=3, target_instance_id=name, closes=closes, opens=opens, extends=extends, drafts=drafts,
        captured=captured,
    )  # fmt: skip
    check_answered(innocent, request)
    innocent.check()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["innocent", "hostile"]),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    poison=st.lists(st.tuples(st.integers(0, 47), floats), max_size=4),
    anchor=u32,
)
def test_true_shapes_with_any_values(
    innocent: Innocent, name: str, counts: list[int], poison: list[tuple[int, float]], anchor: int
) -> None:
    captured = torch.ones(sum(counts), innocent.width)
    for row, value in poison:
        captured[row % len(captured)] = value
    ids = range(20, 20 + len(counts))
    request = pb.DraftRequest(
        target_instance_id=name,
        opens=[pb.OpenSession(session_id=i) for i in ids],
        extends=[pb.ExtendSession(session_id=i, num_rows=n) for i, n in zip(ids, counts, strict=True)],
        drafts=[
            pb.DraftBlock(session_id=i, position=n, anchor=anchor) for i, n in zip(ids, counts, strict=True)
        ],
        captured=wire.encode_tensor(captured),
    )  # fmt: skip
    check_answered(innocent, request)
    innocent.check()
    innocent.answer(
        pb.DraftRequest(target_instance_id=name, closes=[pb.CloseSession(session_id=i) for i in ids])
    )


def check_answered(innocent: Innocent, request: pb.DraftRequest) -> None:
    """One outcome for each session named, and drafts only where they are promised."""
    reply = innocent.answer(request)
    named = {e.session_id for entries in (request.opens, request.extends, request.drafts) for e in entries}
    assert {outcome.session_id for outcome in reply.outcomes} == named
    assert len(reply.outcomes) == len(named)
    rows = [outcome.draft_row for outcome in reply.outcomes if outcome.HasField("draft_row")]
    assert sorted(rows) == list(range(len(drafts_of(reply))))
    for tokens in drafts_of(reply):
        assert all(0 <= token < innocent.drafter.vocab_rows for token in tokens)


@pytest.mark.parametrize(
    "captured",
    [
        tensor_pb2.Tensor(dtype=1, shape=[3, 2**40 // 4], content=b"\0" * 1536),
        tensor_pb2.Tensor(dtype=1, shape=[3, 2**63], content=b""),
        tensor_pb2.Tensor(dtype=1, shape=[2**63, 2], content=b""),
        tensor_pb2.Tensor(dtype=1, shape=[3, 96], content=b"\0" * (3 * 96 * 4 - 1)),
        tensor_pb2.Tensor(dtype=1, shape=[3, 96], content=b"\0" * (3 * 96 * 4 + 1)),
        tensor_pb2.Tensor(dtype=1, shape=[3, 95], content=b"\0" * (3 * 95 * 4)),
        tensor_pb2.Tensor(dtype=1, shape=[4, 96], content=b"\0" * (4 * 96 * 4)),
        tensor_pb2.Tensor(dtype=1, shape=[288], content=b"\0" * (3 * 96 * 4)),
        tensor_pb2.Tensor(dtype=2, shape=[3, 96], content=b"\0" * (3 * 96 * 2)),
        tensor_pb2.Tensor(dtype=0, shape=[3, 96], content=b"\0" * (3 * 96 * 4)),
        tensor_pb2.Tensor(dtype=99, shape=[3, 96], content=b"\0" * (3 * 96 * 4)),
        None,
    ],
    ids=[
        "4 TiB declared", "2**63 wide", "2**63 rows", "a byte short", "a byte long", "wrong width",
        "a row more than the extends name", "flat", "bfloat16", "no type", "unknown type", "absent",
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_the_agreed_one_is_invalid_and_nothing_is_written(
    innocent: Innocent, captured: tensor_pb2.Tensor | None
) -> None:
    num_sessions = innocent.drafter.table.num_sessions
    reply = innocent.answer(pb.DraftRequest(
        target_instance_id="hostile",
        opens=[pb.OpenSession(session_id=50)],
        extends=[pb.ExtendSession(session_id=50, num_rows=3)],
        captured=captured,
    ))  # fmt: skip
    assert outcomes_of(reply) == {50: "INVALID_TENSOR"}
    assert innocent.drafter.table.num_sessions == num_sessions
    innocent.check()


@pytest.mark.parametrize("field", ["closes", "opens", "extends", "drafts"])
def test_more_entries_than_a_message_may_have_are_named_with_the_limit(
    innocent: Innocent, field: str
) -> None:
    count = limits.DRAFT_ENTRIES_MAX + 1
    request = pb.DraftRequest(target_instance_id="hostile")
    for _ in range(count):
        getattr(request, field).add()
    with pytest.raises(InvalidRequest, match=rf"{field}: must be at most {count - 1} entries, got {count}"):
        innocent.answer(request)
    innocent.check()
