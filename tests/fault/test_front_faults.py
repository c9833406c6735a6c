"""Fronts in processes of their own: one is killed, stopped, loses its core; the core is killed, or drains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch

from common import limits
from common.address import UnixAddress
from common.config import load_settings
from common.pb.tandem.v1 import target_pb2 as pb
from common.pb.tandem.v1 import target_pb2_grpc
from common.rpc import open_channel
from services.target.config import TargetSettings
from services.target.core.request import SamplingParams
from services.target.facts import DrafterFacts, ServedModel
from services.target.fronts import FrontFailed, FrontPlan, Fronts
from services.target.model.llama import Llama
from services.target.service import load_model, serve
from tests import core_rig
from tests.fakes import ScriptedCore
from tests.fault.conftest import MAX_LEN, SERVICE_FLAGS, VOCAB_SIZE, TinyPair
from tests.fault.crowd import Ask, crowd, eventually, plain_tokens, some_asks
from tools.child_service import ChildService
from tools.scrape import scrape
from tools.target_client import CallFailed, GenerateOptions, TargetClient


@dataclass
class SplitTarget:
    """A target with two fronts on a TCP port."""

    child: ChildService
    metrics_url: str

    def fronts(self) -> list[psutil.Process]:
        """Its front processes, those that are not dead."""
        return [
            child
            for child in psutil.Process(self.child.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and "services.target.front" in child.cmdline()
        ]

    @contextlib.contextmanager
    def client_of_each(self) -> Iterator[dict[int, TargetClient]]:
        """A client for each front, by the front's process id: the kernel deals out connections."""
        with contextlib.ExitStack() as closing:
            found: dict[int, TargetClient] = {}
            while len(found) < 2:
                before = {front.pid: _num_connections(front) for front in self.fronts()}
                client = closing.enter_context(TargetClient(self.child.address))
                client.server_facts()
                (pid,) = [f.pid for f in self.fronts() if _num_connections(f) > before[f.pid]]
                found.setdefault(pid, client)
            yield found

    def is_idle(self, client: TargetClient) -> bool:
        """Whether every page is free."""
        facts = client.server_facts()
        return facts.num_requests_running == 0 and facts.num_pages_free == facts.num_pages

    def wait_two_fronts(self) -> None:
        """Return when there are two fronts and both listen."""
        eventually(lambda: len(self.fronts()) == 2 and all(map(_listens, self.fronts())), "two fronts", 20)


def _num_connections(process: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))


def _listens(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def shared_target(tiny_pair: TinyPair) -> Iterator[SplitTarget]:
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        address, metrics_port = f"127.0.0.1:{_free_port()}", _free_port()
        child = ChildService(
            "target",
            ["services.target", "--model", str(tiny_pair.model_dir), "--listen", address, "--fronts", "2",
             "--metrics-port", str(metrics_port), *SERVICE_FLAGS],
            address=address,
            log_path=Path(folder) / "target.log",
        )  # fmt: skip
        child.start()
        try:
            child.wait_serving(60)
            yield SplitTarget(child, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            child.stop(10)


@pytest.fixture
def target(shared_target: SplitTarget) -> SplitTarget:
    """Both fronts are there, whatever an earlier test did to them."""
    shared_target.wait_two_fronts()
    return shared_target


def long_ask(rng: random.Random) -> Ask:
    (ask,) = some_asks(rng, 1, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    return ask


def test_the_tokens_are_those_of_a_core_alone_whichever_front_streams_them(
    target: SplitTarget, tiny_pair: TinyPair, rng: random.Random
) -> None:
    asks = some_asks(rng, 6, vocab_size=VOCAB_SIZE, num_tokens=40)
    model = Llama.load(tiny_pair.model_dir, torch.float32)
    alone = core_rig.plain_tokens(model, [_for_core(ask) for ask in asks])
    with target.client_of_each() as clients:
        one, other = clients.values()
        with crowd(one, asks[:3]) as first, crowd(other, asks[3:]) as rest:
            answers = first.answers() + rest.answers()
    assert [answer.token_ids for answer in answers] == alone


def _for_core(ask: Ask) -> core_rig.Ask:
    options = ask.options
    # As they cross the wire: 32-bit numbers.
    message = pb.SamplingParams(temperature=options.temperature, top_p=options.top_p)
    sampling = SamplingParams(message.temperature, 0, message.top_p, 0.0, options.seed or 0)
    assert options.max_new_tokens is not None
    return core_rig.Ask(ask.prompt, options.max_new_tokens, sampling)


def test_refusals_and_aborts_are_right_across_fronts(target: SplitTarget, rng: random.Random) -> None:
    ask = long_ask(rng)
    with target.client_of_each() as clients:
        one, other = clients.values()
        with pytest.raises(CallFailed, match=r"input_ids\[0\]: must be 0 to 191, got 192") as invalid:
            one.generate([VOCAB_SIZE], GenerateOptions())
        assert invalid.value.code is grpc.StatusCode.INVALID_ARGUMENT
        stream = one.start(ask.prompt, ask.options, request_id="same")
        deltas = iter(stream)
        next(deltas)
        with pytest.raises(CallFailed, match="request_id: must be unique among running requests") as taken:
            for _ in other.start(ask.prompt, ask.options, request_id="same"):
                continue
        assert taken.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert other.abort("same"), "through the front that did not get it"
        for _ in deltas:
            continue
        assert stream.answer.finished.reason == pb.FINISH_REASON_ABORT
        assert not one.abort("same")

        left = other.start(ask.prompt, ask.options)
        with pytest.raises(CallFailed):
            for _ in left:
                left.cancel()
        eventually(lambda: target.is_idle(one), "a caller that left has freed its pages")
        eventually(lambda: _refused_calls(target) >= 2, "what fronts measure is on the one page")
        page = scrape(target.metrics_url)
        assert page.value("tandem_target_request_rejected_total", reason="invalid") >= 2


def _refused_calls(target: SplitTarget) -> float:
    labels = (("rpc_method", "/tandem.v1.TargetService/Generate"), ("rpc_status_code", "INVALID_ARGUMENT"))
    samples = scrape(target.metrics_url).samples
    return samples.get(("tandem_rpc_server_call_duration_seconds_count", labels), 0.0)


def test_a_front_that_is_killed_takes_its_own_streams_with_it_and_is_started_again(
    target: SplitTarget, rng: random.Random
) -> None:
    restarts = scrape(target.metrics_url).value("tandem_target_front_restarts_total")
    ask = long_ask(rng)
    with target.client_of_each() as clients:
        (killed, lost), (_, kept) = clients.items()
        short = Ask(ask.prompt, replace(ask.options, max_new_tokens=150))
        expected = plain_tokens(kept, [short])
        gone = lost.start(ask.prompt, ask.options)
        next(iter(gone))
        with crowd(kept, [short]) as running:
            psutil.Process(killed).kill()
            with pytest.raises(CallFailed) as unavailable:
                for _ in gone:
                    continue
            assert unavailable.value.code is grpc.StatusCode.UNAVAILABLE
            assert [a.token_ids for a in running.answers()] == expected
        eventually(lambda: target.is_idle(kept), "its requests were ended")
        target.wait_two_fronts()
        assert killed not in {front.pid for front in target.fronts()}
        assert scrape(target.metrics_url).value("tandem_target_front_restarts_total") == restarts + 1
        # The same client finds the port again, and health says SERVING at the new front, too.
        eventually(lambda: _serves(lost, short, expected[0]), "a client of the lost front is served again")
    target.child.wait_serving(10)


def _serves(client: TargetClient, ask: Ask, expected: list[int]) -> bool:
    with contextlib.suppress(CallFailed):
        return client.generate(ask.prompt, ask.options).token_ids == expected
    return False


def test_a_stopped_front_holds_up_its_own_streams_only_and_loses_no_token(
    target: SplitTarget, rng: random.Random
) -> None:
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=200)
    with target.client_of_each() as clients:
        (stopped, slow), (_, quick) = clients.items()
        expected = plain_tokens(quick, asks)
        with crowd(slow, asks[:1]) as held, crowd(quick, asks[1:]) as running:
            front = psutil.Process(stopped)
            front.suspend()
            try:
                assert [a.token_ids for a in running.answers()] == expected[1:]
                eventually(lambda: target.is_idle(quick), "the core ran both to their end")
                assert held.num_running == 1
            finally:
                front.resume()
            assert [a.token_ids for a in held.answers()] == expected[:1]
        assert {stopped} < {front.pid for front in target.fronts()}, "it was not lost"


def test_a_core_that_is_killed_leaves_no_front_behind_not_even_a_stopped_one() -> None:
    with tempfile.TemporaryDirectory(prefix="td") as folder, contextlib.ExitStack() as ending:
        address = f"127.0.0.1:{_free_port()}"
        core = ChildService(
            "core", ["tests.idle_target", address, "2"], address=address, log_path=Path(folder) / "log"
        )
        core.start()
        ending.callback(core.stop, 1)
        core.wait_serving(60)
        target = SplitTarget(core, "")
        fronts = target.fronts()
        with target.client_of_each() as clients:
            streams = [client.start([1], GenerateOptions()) for client in clients.values()]
            for stream in streams:
                next(iter(stream))
            fronts[0].suspend()
            core.send(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(CallFailed, match="the service's core is gone") as lost:
                    for _ in stream:
                        continue
                assert lost.value.code is grpc.StatusCode.UNAVAILABLE
        eventually(lambda: not any(front.is_running() for front in fronts), "both fronts are gone", 5)


async def test_a_target_that_is_asked_to_end_lets_its_front_finish_what_runs(
    tiny_pair: TinyPair, rng: random.Random
) -> None:
    asks = some_asks(rng, 3, vocab_size=VOCAB_SIZE, num_tokens=50)
    async with serving_here(tiny_pair) as (serving, settings, model):
        alone = core_rig.plain_tokens(model, [_for_core(ask) for ask in asks])
        async with open_channel(settings.listen_address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            tokens: list[list[int]] = [[] for _ in asks]
            begun = asyncio.Barrier(len(asks) + 1)

            async def run(number: int) -> str | None:
                ask, last = asks[number], None
                options = ask.options
                request = pb.GenerateRequest(
                    request_id=f"r{number}", input_ids=ask.prompt, ignore_eos=True,
                    max_new_tokens=options.max_new_tokens,
                    sampling=pb.SamplingParams(
                        temperature=options.temperature, top_p=options.top_p, seed=options.seed or 0
                    ),
                )  # fmt: skip
                async for message in stub.Generate(request, wait_for_ready=True, timeout=30):
                    if last is None:
                        await begun.wait()
                    last = message.WhichOneof("event")
                    tokens[number] += message.delta.token_ids
                return last

            running = [asyncio.create_task(run(number)) for number in range(len(asks))]
            await begun.wait()
            # As supervisors do that signal a whole group: the front leaves the word to its core.
            front = _only_front()
            front.send_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert await asyncio.gather(*running) == ["finished"] * len(asks)
        assert tokens == alone
        assert await asyncio.wait_for(serving, 20) == 0
        assert not front.is_running()


async def test_a_front_whose_core_is_gone_says_so_once_and_ends_with_status_1() -> None:
    core = ScriptedCore()
    model = ServedModel("tiny", "a", vocab_size=100, max_len=1000, eos_token_ids=(2,), dtype="float32")
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        listen = UnixAddress(f"{folder}/t.sock")
        observer = _Observer()
        fronts = Fronts(
            FrontPlan(1, listen, "info", "life", model), DrafterFacts, observer,
            lambda method, status, seconds: None, lambda seconds: None,
        )  # fmt: skip
        core.announce = fronts.announce
        await fronts.start(core, lambda name, work: work.close())  # type: ignore[arg-type]
        async with open_channel(listen) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(request_id="r", input_ids=[1]), timeout=20)
            (front,) = fronts._fronts
            reading = asyncio.create_task(front.joint.run())
            while "r" not in core.requests:
                await asyncio.sleep(0.01)
            core.commit("r", [7])
            messages = aiter(call)
            assert list((await anext(messages)).delta.token_ids) == [7]
            reading.cancel()
            await asyncio.sleep(0)
            front.joint.close()
            with pytest.raises(grpc.aio.AioRpcError, match="the service's core is gone") as lost:
                await anext(messages)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.wait_for(front.process.wait(), 5) == 1
        assert not Path(listen.path).exists()


class _Observer:
    def observe_rejected(self, reason: str) -> None:
        raise AssertionError(reason)

    def observe_front_restart(self) -> None:
        raise AssertionError("nobody watches it here")


async def test_a_front_that_says_nothing_for_too_long_is_replaced(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRONT_SILENCE_S", 1.0)
    async with serving_here(tiny_pair) as (serving, settings, _):
        async with open_channel(settings.listen_address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            request = pb.GenerateRequest(request_id="r", input_ids=[1, 5], ignore_eos=True)
            call = stub.Generate(request, wait_for_ready=True, timeout=30)
            await anext(aiter(call))
            _only_front().suspend()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                async for _ in call:
                    continue
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            # Its id is free, too.
            request.max_new_tokens = 3
            assert await _events_when_served(stub, request) == ["delta"] * 3 + ["finished"]
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(serving, 20) == 0


async def _events_when_served(stub: Any, request: pb.GenerateRequest) -> list[str | None]:
    """The kinds of messages of the first call that is not lost with a connection to who was there before."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                call = stub.Generate(request, wait_for_ready=True, timeout=10)
                return [message.WhichOneof("event") async for message in call]
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def serving_here(
    tiny_pair: TinyPair,
) -> AsyncIterator[tuple[asyncio.Task[int], TargetSettings, Llama]]:
    """A target whose core is this process, with one front."""
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        flags = ["--model", str(tiny_pair.model_dir), "--listen", f"unix:{folder}/t.sock", "--fronts", "1"]
        settings = load_settings(TargetSettings, "services.target", flags)
        model = load_model(settings)
        serving = asyncio.create_task(serve(settings, model))
        try:
            yield serving, settings, model
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def _only_front() -> psutil.Process:
    (front,) = [p for p in psutil.Process().children() if "services.target.front" in p.cmdline()]
    return front


async def test_a_front_that_the_system_has_no_process_for_is_a_failure_to_start_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the end of the core, which asks for it again later; nothing of the try is left."""

    async def no_process(*arguments: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    model = ServedModel("tiny", "a", vocab_size=100, max_len=1000, eos_token_ids=(2,), dtype="float32")
    fronts = Fronts(
        FrontPlan(1, UnixAddress("/nowhere/t.sock"), "info", "life", model), DrafterFacts, _Observer(),
        lambda method, status, seconds: None, lambda seconds: None,
    )  # fmt: skip
    descriptors = psutil.Process().num_fds()
    with pytest.raises(FrontFailed, match="Resource temporarily unavailable"):
        await fronts.start(ScriptedCore(), lambda name, work: work.close())  # type: ignore[arg-type]
    assert psutil.Process().num_fds() == descriptors
