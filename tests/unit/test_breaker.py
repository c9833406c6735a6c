"""The breaker's states and the times of its probes."""

from __future__ import annotations

import pytest

from common import limits
from services.target.core.breaker import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = -50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def closed(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    breaker.probing()
    breaker.connected()
    breaker.answered()
    return breaker


def test_it_starts_open_with_a_probe_due(clock: Clock) -> None:
    breaker = Breaker(clock)
    assert breaker.state is BreakerState.OPEN
    assert breaker.probe_in_s == 0


def test_a_handshake_half_opens_and_an_answer_closes(clock: Clock) -> None:
    breaker = Breaker(clock)
    breaker.connected()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.answered()
    assert breaker.state is BreakerState.CLOSED


def test_misses_in_a_row_open_it(closed: Breaker) -> None:
    for _ in range(limits.BREAKER_MISSES_MAX - 1):
        closed.missed()
        assert closed.state is BreakerState.CLOSED
    closed.missed()
    assert closed.state is BreakerState.OPEN


def test_an_answer_between_misses_starts_the_count_anew(closed: Breaker) -> None:
    for _ in range(3 * limits.BREAKER_MISSES_MAX):
        closed.missed()
        closed.answered()
    assert closed.state is BreakerState.CLOSED


def test_one_miss_opens_a_half_open_one(clock: Clock) -> None:
    breaker = Breaker(clock)
    breaker.connected()
    breaker.missed()
    assert breaker.state is BreakerState.OPEN


def test_misses_before_the_opening_do_not_count_after_it(closed: Breaker) -> None:
    for _ in range(limits.BREAKER_MISSES_MAX):
        closed.missed()
    closed.connected()
    closed.answered()
    closed.missed()
    assert closed.state is BreakerState.CLOSED


def test_a_lost_connection_opens_it_from_any_state(clock: Clock, closed: Breaker) -> None:
    closed.lost()
    assert closed.state is BreakerState.OPEN
    closed.lost()
    assert closed.state is BreakerState.OPEN
    closed.connected()
    closed.lost()
    assert closed.state is BreakerState.OPEN


def test_probes_are_an_interval_apart(clock: Clock) -> None:
    breaker = Breaker(clock)
    breaker.probing()
    assert breaker.probe_in_s == limits.PROBE_INTERVAL_S
    clock.now += limits.PROBE_INTERVAL_S - 0.25
    assert breaker.probe_in_s == 0.25
    clock.now += 10
    assert breaker.probe_in_s == 0


def test_after_missed_deadlines_the_drafter_has_an_interval_of_peace(clock: Clock, closed: Breaker) -> None:
    clock.now += 100
    for _ in range(limits.BREAKER_MISSES_MAX):
        closed.missed()
    assert closed.probe_in_s == limits.PROBE_INTERVAL_S


def test_after_a_lost_connection_it_looks_at_once(clock: Clock, closed: Breaker) -> None:
    clock.now += 100
    closed.lost()
    assert closed.probe_in_s == 0


def test_each_time_that_it_is_given_up_in_a_row_doubles_the_peace(clock: Clock, closed: Breaker) -> None:
    """Every try costs a step a whole deadline (I7)."""
    pauses = []
    for _ in range(7):
        closed.gave_up()
        pauses.append(closed.probe_in_s)
        assert closed.state is BreakerState.OPEN
        clock.now += 100
        closed.probing()
        closed.connected()
    assert pauses == [1, 2, 4, 8, 16, limits.GIVEN_UP_PAUSE_MAX_S, limits.GIVEN_UP_PAUSE_MAX_S]
    closed.answered()
    closed.gave_up()
    assert closed.probe_in_s == limits.PROBE_INTERVAL_S


def test_a_drafter_may_be_given_up_for_ever(clock: Clock, closed: Breaker) -> None:
    """A pause that is a power of the count overflows at the 1024th, after some hours."""
    for _ in range(2000):
        closed.gave_up()
        clock.now += 100
        closed.probing()
        closed.connected()
    closed.gave_up()
    assert closed.probe_in_s == limits.GIVEN_UP_PAUSE_MAX_S
