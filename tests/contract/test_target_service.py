"""tandem.v1.TargetService over a real server and socket, with a scripted core behind it: called directly, or
over the joint by which a front in a process of its own asks."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import lifecycle, limits
from common.address import Address, UnixAddress
from common.errors import Overloaded, TandemError, Unavailable
from common.lifecycle import Lifecycle
from common.pb.tandem.v1 import target_pb2 as pb
from common.pb.tandem.v1 import target_pb2_grpc
from common.rpc import RpcServer, open_channel
from services.target.core.request import FinishReason
from services.target.facts import DrafterFacts, DrafterState, ServedModel
from services.target.front.servicer import SERVICE, RunsRequests, TargetServicer
from tests.fakes import ScriptedCore
from tests.joint_rig import joined, until

MODEL = ServedModel(
    "tiny", "LlamaForCausalLM", vocab_size=100, max_len=100_000, eos_token_ids=(2,), dtype="float32"
)
BACKLOG = 4096


class Rig:
    """A front over a scripted core, and a client."""

    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.calls: list[tuple[str, str]] = []
        self.rejected: list[str] = []
        self.drafter = DrafterFacts()
        self.rpc = RpcServer(
            [SERVICE.full_name], lambda method, status, s: self.calls.append((method, status))
        )

    async def serve(
        self, address: Address, core: RunsRequests, drafter_facts: Callable[[], DrafterFacts]
    ) -> None:
        """Serve with that as the core."""
        self._drafter_facts = drafter_facts
        servicer = TargetServicer(
            core, MODEL, instance_id="life-1", drafter_facts=drafter_facts,
            observe_rejected=self.rejected.append, backlog_tokens_max=BACKLOG,
        )  # fmt: skip
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, self.rpc.server)
        await self.rpc.start(address)
        await self.rpc.set_serving(True)
        self.channel = open_channel(address)
        self.stub = target_pb2_grpc.TargetServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def generate(self, request_id: str = "r", timeout: float | None = 20, **fields: Any) -> Any:
        return self.stub.Generate(
            pb.GenerateRequest(**{"request_id": request_id, "input_ids": [1, 2, 3]} | fields), timeout=timeout
        )

    async def admitted(self, request_id: str = "r") -> None:
        await until(lambda: request_id in self.core.requests)

    async def change_drafter(self, facts: DrafterFacts) -> None:
        """Let the core see the drafter so, and return when the front does."""
        self.drafter = facts
        self.core.announce()
        await until(lambda: self._drafter_facts() == facts)


async def code_of(call: Any) -> grpc.StatusCode:
    return (await error_of(call)).code()


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            continue
    return caught.value


@pytest.fixture(params=["one process", "joint"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig()
    async with contextlib.AsyncExitStack() as ending:
        # Not pytest's folder: a socket's path must fit 107 bytes.
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="td"))
        address = UnixAddress(str(Path(folder) / "t.sock"))
        if request.param == "joint":
            joint = await ending.enter_async_context(
                joined(rig.core, lambda: (rig.core.stats(), rig.drafter))
            )
            joint.core_end.announce()
            await rig.serve(address, joint.front_end, joint.front_end.drafter_facts)
            await until(lambda: joint.front_end.stats().num_pages)
        else:
            await rig.serve(address, rig.core, lambda: rig.drafter)
        yield rig
        await rig.channel.close()
        await rig.rpc.stop(0)


async def test_deltas_and_exactly_one_finished_arrive_in_order(rig: Rig) -> None:
    call = rig.generate(sampling=pb.SamplingParams(seed=5))
    await rig.admitted()
    await asyncio.to_thread(rig.core.commit, "r", [10, 11, 12])
    first = await anext(aiter(call))
    assert (list(first.delta.token_ids), list(first.delta.from_draft)) == ([10, 11, 12], [False, True, False])
    await asyncio.to_thread(rig.core.commit, "r", [2])
    await asyncio.to_thread(rig.core.finish, "r", FinishReason.STOP, 2)
    rest = [message async for message in call]
    assert [list(m.delta.token_ids) for m in rest[:-1]] == [[2]]
    finished = rest[-1].finished
    assert (finished.reason, finished.matched_token_id) == (pb.FINISH_REASON_STOP, 2)
    assert (finished.num_prompt_tokens, finished.num_output_tokens, finished.seed) == (3, 4, 5)
    assert await call.code() is grpc.StatusCode.OK
    await until(lambda: rig.calls == [("/tandem.v1.TargetService/Generate", "OK")])
    assert rig.core.aborted == []


async def test_tokens_that_wait_for_the_reader_arrive_as_one_delta(rig: Rig) -> None:
    call = rig.generate()
    await rig.admitted()
    # On the loop's own thread nothing can be sent in between.
    for token in (10, 11, 12):
        rig.core.commit("r", [token])
    rig.core.finish("r", FinishReason.LENGTH)
    messages = [message async for message in call]
    assert [list(m.delta.token_ids) for m in messages[:-1]] == [[10, 11, 12]]
    assert not messages[-1].finished.HasField("matched_token_id")


async def test_a_refused_request_ends_with_a_status_and_no_initial_metadata(rig: Rig) -> None:
    call = rig.generate(input_ids=[1, 100])
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "input_ids[1]: must be 0 to 99, got 100"
    assert not rig.core.requests
    assert rig.rejected == ["invalid"]
    await until(lambda: rig.calls == [("/tandem.v1.TargetService/Generate", "INVALID_ARGUMENT")])


async def test_nothing_is_sent_before_the_first_token(rig: Rig) -> None:
    call = rig.generate()
    await rig.admitted()
    metadata = asyncio.create_task(call.initial_metadata())
    await asyncio.sleep(0.1)
    assert not metadata.done()
    rig.core.fail("r", Unavailable("service failed"))
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    await metadata


@pytest.mark.parametrize(
    ("refusal", "code", "reason"),
    [
        (Overloaded("requests", limit=1, given=1), grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
        (Unavailable("service is draining"), grpc.StatusCode.UNAVAILABLE, "unavailable"),
    ],
)
async def test_a_core_that_admits_no_more_is_a_status(
    rig: Rig, refusal: TandemError, code: grpc.StatusCode, reason: str
) -> None:
    rig.core.refusal = refusal
    error = await error_of(rig.generate())
    assert (error.code(), error.details()) == (code, str(refusal))
    assert rig.rejected == [reason]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Unavailable("service failed"), grpc.StatusCode.UNAVAILABLE),
        (TandemError("logits: must be finite, got NaN"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_request_that_fails_after_tokens_keeps_them_and_ends_with_the_status(
    rig: Rig, failure: TandemError, code: grpc.StatusCode
) -> None:
    call = rig.generate()
    await rig.admitted()
    rig.core.commit("r", [10])
    assert list((await anext(aiter(call))).delta.token_ids) == [10]
    rig.core.fail("r", failure)
    assert await code_of(call) is code
    assert rig.core.aborted == []


async def test_the_same_id_may_run_once_at_a_time(rig: Rig) -> None:
    call = rig.generate("same")
    await rig.admitted("same")
    error = await error_of(rig.generate("same"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id: must be unique" in (error.details() or "")
    rig.core.commit("same", [7])
    rig.core.finish("same", FinishReason.LENGTH)
    assert [list(m.delta.token_ids) async for m in call][0] == [7], "the first is undisturbed"
    again = rig.generate("same")
    await until(lambda: rig.core.is_known("same"))
    rig.core.finish("same", FinishReason.LENGTH)
    assert [m.WhichOneof("event") async for m in again] == ["finished"]


async def test_abort_ends_the_stream_with_finished_and_unknown_ids_are_a_normal_answer(rig: Rig) -> None:
    call = rig.generate()
    await rig.admitted()
    rig.core.commit("r", [10])
    assert (await rig.stub.Abort(pb.AbortRequest(request_id="r"))).found
    messages = [message async for message in call]
    assert messages[-1].finished.reason == pb.FINISH_REASON_ABORT
    assert messages[-1].finished.num_output_tokens == 1
    assert not (await rig.stub.Abort(pb.AbortRequest(request_id="r"))).found
    assert not (await rig.stub.Abort(pb.AbortRequest(request_id="never"))).found
    assert rig.core.aborted == ["r"]


async def test_an_id_that_no_request_can_have_is_no_question_for_the_core(rig: Rig) -> None:
    for request_id in ("", "r" * (limits.REQUEST_ID_CHARS_MAX + 1), "r\n"):
        with pytest.raises(grpc.aio.AioRpcError, match="request_id") as refused:
            await rig.stub.Abort(pb.AbortRequest(request_id=request_id))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rig.core.aborted == []


@pytest.mark.parametrize("with_tokens", [False, True])
async def test_a_caller_that_leaves_frees_its_request_at_once(rig: Rig, with_tokens: bool) -> None:
    call = rig.generate()
    await rig.admitted()
    if with_tokens:
        rig.core.commit("r", [10])
        await anext(aiter(call))
    call.cancel()
    await until(lambda: rig.core.aborted == ["r"])
    await until(lambda: rig.calls == [("/tandem.v1.TargetService/Generate", "CANCELLED")])


async def test_a_caller_whose_connection_breaks_frees_its_request(rig: Rig) -> None:
    rig.generate(timeout=None)
    await rig.admitted()
    await rig.channel.close()
    await until(lambda: rig.core.aborted == ["r"])


async def test_a_deadline_that_passes_frees_the_request(rig: Rig) -> None:
    call = rig.generate(timeout=0.1)
    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: rig.core.aborted == ["r"])


async def overflow(rig: Rig, request_id: str) -> None:
    """Commit tokens that nobody reads, until the transport's window and then the backlog are full."""
    async with asyncio.timeout(60):
        while request_id not in rig.core.aborted:
            # 5 bytes an id: what the transport buffers is soon full.
            rig.core.commit(request_id, [2**32 - 1] * (BACKLOG // 2))
            await asyncio.sleep(0.005)


async def test_a_slow_reader_loses_its_own_stream_and_nobody_elses(rig: Rig) -> None:
    slow, quick = rig.generate("slow", timeout=60), rig.generate("quick", timeout=60)
    await rig.admitted("slow")
    await rig.admitted("quick")
    await overflow(rig, "slow")
    rig.core.commit("quick", [7])
    rig.core.finish("quick", FinishReason.LENGTH)
    assert [m.WhichOneof("event") async for m in quick] == ["delta", "finished"]
    assert rig.rejected == ["slow_reader"]
    error = await error_of(slow)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.details() or "").startswith(f"tokens not yet read: limit is {BACKLOG}, have ")


async def test_a_slow_reader_that_leaves_instead_takes_its_stream_with_it(rig: Rig) -> None:
    slow = rig.generate("slow", timeout=60)
    await rig.admitted("slow")
    await overflow(rig, "slow")
    assert rig.calls == [], "it is stuck in a write"
    slow.cancel()
    # The write may fail, or succeed into nowhere and the stream end with its own error.
    await until(lambda: len(rig.calls) == 1)
    assert rig.calls[0][1] in {"CANCELLED", "RESOURCE_EXHAUSTED"}
    assert rig.core.aborted == ["slow"], "not twice: the id may be another request's by now"


async def test_facts_about_the_model(rig: Rig) -> None:
    facts = await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (facts.served_model_name, facts.architecture) == ("tiny", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.max_len, list(facts.eos_token_ids)) == (100, 100_000, [2])
    assert facts.dtype == "float32"


async def test_facts_about_the_process_and_its_drafter(rig: Rig) -> None:
    facts = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert facts.instance_id == "life-1"
    assert facts.version
    assert facts.uptime_s > 0
    assert (facts.num_requests_waiting, facts.num_pages, facts.num_pages_free) == (3, 64, 60)
    assert facts.drafter_state == pb.DRAFTER_STATE_DISABLED
    for state in DrafterState:
        await rig.change_drafter(
            DrafterFacts(state, block_size=8, num_sessions=2, mismatches=("dtype: ours a, theirs b",))
        )
        facts = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert pb.DrafterState.Name(facts.drafter_state) == f"DRAFTER_STATE_{state.name}"
        assert (facts.block_size, facts.num_drafter_sessions) == (8, 2)
        assert list(facts.contract_mismatches) == ["dtype: ours a, theirs b"]


async def test_health_answers_for_the_process_and_the_service(rig: Rig) -> None:
    for name in ("", "tandem.v1.TargetService"):
        answer = await rig.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.health.Check(health_pb2.HealthCheckRequest(service="tandem.v1.Nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_there_is_no_reflection(rig: Rig) -> None:
    ask = rig.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert await code_of(ask(iter([b""]))) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_is_refused_and_the_service_goes_on(rig: Rig) -> None:
    error = await error_of(rig.generate(request_id="x" * (9 * 1024 * 1024)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await rig.stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == 100


async def test_bytes_that_are_no_message_are_an_error_and_the_service_goes_on(rig: Rig) -> None:
    ask = rig.channel.unary_stream("/tandem.v1.TargetService/Generate")
    assert await code_of(ask(b"\xff\xff\xff\xff")) is grpc.StatusCode.INVALID_ARGUMENT
    assert not rig.core.requests
    assert (await rig.stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == 100


async def test_an_unforeseen_exception_tells_the_caller_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("secret detail")

    monkeypatch.setattr("services.target.front.servicer.parse_generate", broken)
    error = await error_of(rig.generate())
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")


class DrainingService:
    """What services.target.service does to drain, over the scripted core."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def set_serving(self, serving: bool) -> None:
        await self._rig.rpc.set_serving(serving)

    async def drain(self) -> None:
        self._rig.core.refusal = Unavailable("service is draining")
        await until(lambda: not self._rig.core.is_known("r"))

    async def stop(self) -> None:
        await self._rig.rpc.stop(1)


async def test_watchers_hear_not_serving_before_the_first_refusal_and_running_requests_finish(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "NOTICE_S", 0.3)
    life = Lifecycle(DrainingService(rig), grace_s=10)
    running = asyncio.create_task(life.run())
    watch = rig.health.Watch(health_pb2.HealthCheckRequest(service="tandem.v1.TargetService"))
    statuses = health_pb2.HealthCheckResponse
    while (await watch.read()).status != statuses.SERVING:
        continue
    call = rig.generate()
    await rig.admitted()
    rig.core.commit("r", [10])

    life.ask_stop()
    assert (await asyncio.wait_for(watch.read(), 5)).status == statuses.NOT_SERVING
    assert rig.core.refusal is None, "whoever watches knows before anybody is refused"
    late = rig.generate("late")
    await rig.admitted("late")
    rig.core.finish("late", FinishReason.LENGTH)
    assert [m.WhichOneof("event") async for m in late] == ["finished"]
    await until(lambda: rig.core.refusal is not None)
    assert await code_of(rig.generate("too late")) is grpc.StatusCode.UNAVAILABLE

    rig.core.commit("r", [11])
    rig.core.finish("r", FinishReason.LENGTH)
    messages = [message async for message in call]
    assert [token for m in messages for token in m.delta.token_ids] == [10, 11]
    assert messages[-1].finished.reason == pb.FINISH_REASON_LENGTH
    watch.cancel()
    assert await asyncio.wait_for(running, 10) == 0
