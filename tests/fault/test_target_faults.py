"""The target's own ends: drain, callers that leave, a kill, a pool too small for all."""

from __future__ import annotations

import random
import signal
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.pb.tandem.v1 import target_pb2
from tests.fault.conftest import MAX_LEN, VOCAB_SIZE, TinyPair
from tests.fault.crowd import (
    UP,
    assert_drafting,
    assert_plain,
    crowd,
    eventually,
    plain_tokens,
    some_asks,
    wait_drafter,
)
from tools.local_stack import LocalStack
from tools.scrape import scrape
from tools.target_client import CallFailed, GenerateOptions, TargetClient

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_target_that_is_asked_to_end_says_so_refuses_new_requests_and_finishes_the_running_ones(
    tiny_pair: TinyPair, rng: random.Random
) -> None:
    asks = some_asks(rng, 3, vocab_size=VOCAB_SIZE, num_tokens=300)
    with tiny_pair.stack() as stack, TargetClient(stack.target.address) as client:
        wait_drafter(client, UP)
        expected = plain_tokens(client, asks)
        with grpc.insecure_channel(stack.target.address) as channel, crowd(client, asks) as running:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == SERVING
            stack.target.send(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            # Those who watch health get a moment to learn it before the first refusal.
            eventually(lambda: _refusal(client) == grpc.StatusCode.UNAVAILABLE, "new requests are refused")
            assert running.num_running == len(asks), "ended before the drain could be seen"
            assert [a.token_ids for a in running.answers()] == expected
            assert stack.target.wait_ended(15) == 0
        sessions = scrape(stack.drafter_metrics_url).value("tandem_drafter_num_sessions")
        assert sessions == 0, "a target that ends in peace gives its sessions back"


def test_a_caller_that_leaves_frees_its_pages_and_its_session(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    (ask,) = some_asks(rng, 1, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    stream = client.start(ask.prompt, ask.options)
    with pytest.raises(CallFailed) as left:
        for _ in stream:
            stream.cancel()
    assert left.value.code == grpc.StatusCode.CANCELLED
    eventually(lambda: _idle(client, stack), "pages and sessions are free")


def test_an_aborted_request_ends_with_what_it_had(client: TargetClient, rng: random.Random) -> None:
    (ask,) = some_asks(rng, 1, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    stream = client.start(ask.prompt, ask.options)
    deltas = iter(stream)
    next(deltas)
    assert client.abort(stream.request_id)
    for _ in deltas:
        continue
    answer = stream.answer
    assert answer.finished.reason == target_pb2.FINISH_REASON_ABORT
    assert 0 < len(answer.token_ids) < MAX_LEN - 100
    assert_plain(client, [ask], [answer])
    assert not client.abort(stream.request_id)


def test_a_killed_target_leaves_the_drafter_fit_for_the_next_one(
    tiny_pair: TinyPair, rng: random.Random
) -> None:
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    with tiny_pair.stack() as stack:
        with TargetClient(stack.target.address) as client:
            wait_drafter(client, UP)
            streams = [client.start(a.prompt, a.options) for a in asks]
            for stream in streams:
                next(iter(stream))
            stack.target.send(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(CallFailed) as lost:
                    for _ in stream:
                        continue
                assert lost.value.code == grpc.StatusCode.UNAVAILABLE
            stack.target.wait_ended(5)
        stack.target.start()
        stack.target.wait_serving(30)
        with TargetClient(stack.target.address) as client:
            wait_drafter(client, UP)
            assert_drafting(client, asks[0])
        assert stack.drafter.running


def test_five_hundred_mixed_requests_with_cancellations_leak_no_page_and_no_session(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 500, vocab_size=VOCAB_SIZE, num_tokens=24)
    waiting = list(enumerate(asks))
    fates: list[str | None] = [None] * len(asks)
    lock = threading.Lock()
    # Drawn here, since a generator shared by threads would not repeat a run.
    wishes = [rng.choice(("finish", "finish", "cancel", "abort", "refused")) for _ in asks]
    after = [rng.randint(0, 12) for _ in asks]

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number, ask = waiting.pop()
            prompt = [] if wishes[number] == "refused" else ask.prompt
            stream = client.start(prompt, ask.options)
            try:
                if wishes[number] == "cancel" and after[number] == 0:
                    stream.cancel()
                for count, _ in enumerate(stream, 1):
                    if count == after[number] and wishes[number] == "cancel":
                        stream.cancel()
                    if count == after[number] and wishes[number] == "abort":
                        client.abort(stream.request_id)
                fates[number] = "finish"
            except CallFailed as failed:
                fates[number] = failed.code.name

    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {"finish": {"finish"}, "abort": {"finish"}, "cancel": {"CANCELLED", "finish"},
                "refused": {"INVALID_ARGUMENT"}}  # fmt: skip
    wrong = [(w, f) for w, f in zip(wishes, fates, strict=True) if f not in expected[w]]
    assert not wrong
    assert fates.count("CANCELLED") > 30 and fates.count("finish") > 200
    eventually(lambda: _idle(client, stack), "pages and sessions are free")
    target, drafter = scrape(stack.target_metrics_url), scrape(stack.drafter_metrics_url)
    for page, prefix in ((target, "tandem_target"), (drafter, "tandem_drafter")):
        assert page.value(f"{prefix}_pages_unaccounted") == 0
        assert page.value(f"{prefix}_kv_cache_usage_perc") == 0
    assert drafter.value("tandem_drafter_num_sessions") == 0
    assert drafter.value("tandem_drafter_sessions_opened_total") > 200


def test_more_requests_than_pages_all_end_with_the_plain_tokens(
    tiny_pair: TinyPair, rng: random.Random
) -> None:
    asks = some_asks(rng, 8, vocab_size=VOCAB_SIZE, num_tokens=100)
    with tiny_pair.stack(target_flags=("--kv-tokens", "512", "--max-len", "512")) as stack:
        with TargetClient(stack.target.address) as client:
            wait_drafter(client, UP)
            alone = [plain_tokens(client, [ask])[0] for ask in asks]
            # 8 requests of 100 and more tokens in room for 512: some must wait or make way.
            with crowd(client, asks[:1]) as first, crowd(client, asks[1:4]) as rest:
                answers = first.answers() + rest.answers()
            assert [a.token_ids for a in answers] == alone[:4]
            together = [client.start(ask.prompt, ask.options) for ask in asks]
            for stream in together:
                for _ in stream:
                    continue
            assert [stream.answer.token_ids for stream in together] == alone
            eventually(lambda: _idle(client, stack), "pages and sessions are free")


def _refusal(client: TargetClient) -> grpc.StatusCode | None:
    """The status of a short request, None if it was served."""
    try:
        client.generate([5], GenerateOptions(max_new_tokens=1))
    except CallFailed as failed:
        return failed.code
    return None


def _idle(client: TargetClient, stack: LocalStack) -> bool:
    facts = client.server_facts()
    sessions = scrape(stack.drafter_metrics_url).value("tandem_drafter_num_sessions")
    return (
        facts.num_requests_running == facts.num_requests_waiting == 0
        and facts.num_pages_free == facts.num_pages
        and facts.num_drafter_sessions == sessions == 0
    )
