"""What a drafter tells before any draft: handshake, health and metrics over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import limits, wire
from common.handoff.transport import Outcome
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.rpc import open_channel
from services.drafter.session import CloseReason
from tests.builders_drafter import build_draft_pair
from tests.drafter_rig import DrafterRig, serving_drafter


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=21)


@pytest.fixture
async def rig(checkpoints: tuple[Path, Path]) -> AsyncIterator[DrafterRig]:
    async with serving_drafter(checkpoints) as rig:
        yield rig


def failed(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return error.value.code(), error.value.details() or ""


async def test_a_handshake_tells_what_the_draft_asks_of_the_target(rig: DrafterRig) -> None:
    async with rig.target(shake=False) as target:
        answer = await target.shake_hands()
    assert wire.decode_target_contract(answer.target) == rig.facts.target
    assert wire.decode_draft_contract(answer.draft) == rig.facts.draft
    assert answer.transport == pb.TRANSPORT_INLINE
    assert answer.drafter_instance_id == rig.facts.instance_id
    assert answer.num_sessions_max == rig.facts.num_sessions_max
    assert answer.lease_s == limits.SESSION_LEASE_S


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 47),
        ("num_layers", 5),
        ("vocab_rows", 193),
        ("dtype", 2),
        ("dtype", 77),
        ("weights_fingerprint", "feedbeef"),
        ("protocol_version", 2),
        ("transport", pb.TRANSPORT_DEVICE),
        ("transport", pb.TRANSPORT_UNSPECIFIED),
    ],
)
async def test_what_does_not_fit_is_named_with_both_values(rig: DrafterRig, field: str, value: Any) -> None:
    async with rig.target(shake=False) as target:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await target.shake_hands(**{field: value})
    code, text = failed(error)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert text.startswith(f"{field}: ours ")
    theirs = {("dtype", 2): "bfloat16", ("transport", 2): "TRANSPORT_DEVICE", ("transport", 0): "UNSPECIFIED"}
    assert theirs.get((field, value), str(value)) in text


async def test_every_field_that_does_not_fit_is_named_at_once(rig: DrafterRig) -> None:
    async with rig.target(shake=False) as target:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await target.shake_hands(hidden_size=47, vocab_rows=9)
    assert "hidden_size: ours 48, theirs 47" in failed(error)[1]
    assert "vocab_rows: ours 192, theirs 9" in failed(error)[1]


@pytest.mark.parametrize("name", ["", "x" * 65])
async def test_an_instance_id_has_1_to_64_characters(rig: DrafterRig, name: str) -> None:
    async with rig.target(name, shake=False) as target:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await target.shake_hands()
    assert failed(error) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"target_instance_id: must be 1 to 64 characters, got {len(name)}",
    )


async def test_health_follows_what_the_lifecycle_says(rig: DrafterRig) -> None:
    async with open_channel(rig.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="tandem.v1.DrafterService")
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        await rig.service.set_serving(False)
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_every_metric_exists_at_0_before_the_first_message(rig: DrafterRig) -> None:
    for name in (
        "draft_batch_size_count{", "num_sessions{", "queue_depth{", "kv_cache_usage_perc{",
        "pages_unaccounted{", "gpu_thread_heartbeat_age_seconds{", "sessions_opened_total{",
        "context_tokens_total{", "ingest_bytes_total{", "draft_tokens_total{",
    ):  # fmt: skip
        assert rig.metric(name) == 0
    for phase in ("queue", "ingest", "draft", "total"):
        assert rig.metric(f'draft_time_seconds_count{{model_name="draft",phase="{phase}"}}') == 0
    for outcome in Outcome:
        assert (
            rig.metric(f'session_outcome_total{{model_name="draft",outcome="{outcome.name.lower()}"}}') == 0
        )
    for reason in CloseReason:
        assert rig.metric(f'sessions_closed_total{{model_name="draft",reason="{reason.value}"}}') == 0


async def test_metrics_count_what_a_message_did(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        await stream.ask(target.first_message(1, num_rows=6))
        await stream.ask(target.message(drafts=[pb.DraftBlock(session_id=9, anchor=1)]))
    assert rig.metric("context_tokens_total{") == 6
    assert rig.metric("ingest_bytes_total{") == 6 * rig.facts.captured_width * 4
    assert rig.metric("draft_tokens_total{") == rig.facts.draft.num_draft_tokens
    assert rig.metric("sessions_opened_total{") == 1
    assert rig.metric('session_outcome_total{model_name="draft",outcome="ok"}') == 1
    assert rig.metric('session_outcome_total{model_name="draft",outcome="unknown_session"}') == 1
    assert rig.metric('draft_time_seconds_count{model_name="draft",phase="draft"}') == 1
    assert rig.metric('draft_time_seconds_count{model_name="draft",phase="total"}') == 2
    assert rig.metric("kv_cache_usage_perc{") > 0
