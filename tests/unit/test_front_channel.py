"""The channel from the core's thread to a stream: order, coalescing, bounds, one ending."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from common.errors import Overloaded, Unavailable
from services.target.core.request import FinishReason, Request, RequestFailed, SamplingParams, TokensCommitted
from services.target.front.channel import EventChannel


def tokens(*ids: int) -> TokensCommitted:
    return TokensCommitted(list(ids), [i % 2 == 0 for i in ids])


def ending() -> object:
    request = Request("r", [1], SamplingParams(), 1, frozenset(), True, emit=lambda event: None)
    return request.finish(FinishReason.LENGTH)


def never() -> None:
    pytest.fail("the reader was not slow")


async def test_events_that_wait_become_one_and_keep_their_order() -> None:
    channel = EventChannel(never)
    channel.emit(tokens(1, 2))
    channel.emit(tokens(3))
    end = ending()
    channel.emit(end)  # type: ignore[arg-type]
    assert await channel.receive() == TokensCommitted([1, 2, 3], [False, True, False])
    assert await channel.receive() is end


async def test_a_reader_that_waits_is_woken_from_another_thread() -> None:
    channel = EventChannel(never)
    reading = asyncio.create_task(channel.receive())
    await asyncio.sleep(0.01)
    threading.Thread(target=channel.emit, args=(tokens(5),)).start()
    assert await asyncio.wait_for(reading, 5) == tokens(5)


async def test_nothing_comes_after_the_terminal_event() -> None:
    channel = EventChannel(never)
    failed = RequestFailed(Unavailable("service failed"))
    channel.emit(failed)
    channel.emit(tokens(1))
    channel.emit(RequestFailed(Unavailable("again")))
    assert channel.has_ended
    assert await channel.receive() is failed


async def test_no_token_is_lost_repeated_or_reordered_between_threads() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    channel = EventChannel(never, backlog_tokens_max=100_000)

    def core() -> None:
        next_id = 0
        while next_id < 5000:
            count = rng.randrange(1, 9)
            channel.emit(tokens(*range(next_id, next_id + count)))
            next_id += count
        channel.emit(RequestFailed(Unavailable("end")))

    thread = threading.Thread(target=core)
    thread.start()
    received: list[int] = []
    while isinstance(event := await asyncio.wait_for(channel.receive(), 10), TokensCommitted):
        received += event.token_ids
        assert event.from_draft == [i % 2 == 0 for i in event.token_ids]
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)
    thread.join()
    assert received == list(range(len(received)))
    assert len(received) >= 5000


async def test_a_backlog_over_its_limit_ends_the_stream_once_and_frees_what_waited() -> None:
    overflows: list[str] = []
    channel = EventChannel(lambda: overflows.append("overflow"), backlog_tokens_max=4)
    channel.emit(tokens(1, 2, 3, 4))
    await asyncio.sleep(0)
    assert not overflows, "the limit itself is allowed"
    for _ in range(3):
        channel.emit(tokens(5))
    await asyncio.sleep(0.01)
    assert overflows == ["overflow"]
    event = await channel.receive()
    assert isinstance(event, RequestFailed)
    assert isinstance(event.error, Overloaded)
    assert "limit is 4, have 5" in str(event.error)
