"""The watchdog lets a stream go on that waits for a peer which is late or gone, and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from common.handoff.watchdog import LOOKS_PER_DEADLINE, Watchdog

DEADLINE_S = 0.5


class Rig:
    """A watchdog whose thread is not started: the test looks, at times that it sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.released: list[int] = []
        self.waits: list[int] = []
        self.passed = 0
        self.missed = 0
        self.watchdog = Watchdog(self.released.append, DEADLINE_S, self.on_missed, lambda: self.now)

    def on_missed(self) -> None:
        self.missed += 1

    def watch(self, sequence: int, is_due: Callable[[], bool] = lambda: True) -> None:
        def enqueue() -> Callable[[], bool]:
            self.waits.append(sequence)
            return lambda: self.passed >= sequence

        self.watchdog.watch(sequence, is_due, enqueue)

    def look_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.watchdog.look()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_wait_that_lasts_longer_than_the_deadline_is_let_go(rig: Rig) -> None:
    rig.watch(7)
    assert not rig.look_after(0)
    assert not rig.look_after(0.43)
    assert rig.look_after(0.03)
    assert rig.released == [7] and rig.watchdog.has_tripped
    rig.passed = 7
    assert not rig.look_after(10)
    assert rig.released == [7]


@pytest.mark.parametrize("come_after_look", [0.0, 0.3, 0.999])
def test_a_stream_waits_no_longer_than_the_deadline_whenever_it_comes_to_its_wait(
    rig: Rig, come_after_look: float
) -> None:
    """With looks as the thread makes them."""
    look_s = DEADLINE_S / LOOKS_PER_DEADLINE
    due_at = rig.now + come_after_look * look_s
    rig.watch(7, lambda: rig.now >= due_at)
    while not rig.look_after(look_s):
        pass
    assert 0.8 * DEADLINE_S < rig.now - due_at <= DEADLINE_S


def test_a_release_is_made_again_until_the_stream_is_past_the_wait(rig: Rig) -> None:
    rig.watch(7)
    rig.watchdog.trip()
    for _ in range(3):
        rig.look_after(0)
    assert rig.released == [7] * 4
    rig.passed = 7
    for _ in range(3):
        rig.look_after(0)
    assert rig.released == [7] * 4


def test_time_does_not_count_before_the_stream_has_come_to_the_wait(rig: Rig) -> None:
    is_due = False
    rig.watch(7, lambda: is_due)
    for _ in range(9):
        assert not rig.look_after(1)
    is_due = True
    assert not rig.look_after(1)
    assert not rig.look_after(0.43)
    assert rig.look_after(0.03)


def test_a_wait_that_is_over_is_not_let_go(rig: Rig) -> None:
    rig.watch(7)
    rig.look_after(0)
    rig.watchdog.disarm(7)
    assert not rig.look_after(10)
    assert rig.released == []


def test_the_end_of_an_earlier_wait_is_not_the_end_of_a_later_one(rig: Rig) -> None:
    rig.watch(7)
    rig.watch(8)
    rig.watchdog.disarm(7)
    assert not rig.look_after(0)
    assert rig.look_after(1)
    assert rig.released == [8]


def test_the_oldest_wait_is_timed_and_all_are_let_go(rig: Rig) -> None:
    """The stream cannot come to the second wait before the first has ended: nobody would time that."""
    rig.watch(7)
    rig.watch(8, lambda: rig.passed >= 7)
    assert not rig.look_after(0)
    assert rig.look_after(0.51)
    rig.passed = 7
    rig.look_after(0)
    assert rig.released == [8, 8]
    rig.passed = 8
    rig.look_after(0)
    assert rig.released == [8, 8]


def test_each_wait_has_a_deadline_of_its_own(rig: Rig) -> None:
    for sequence in range(1, 20):
        rig.watch(sequence)
        assert not rig.look_after(0.3)
        rig.passed = sequence
    assert rig.released == []


def test_a_lost_peers_wait_is_let_go_at_once_and_nothing_waits_for_it_later(rig: Rig) -> None:
    rig.watch(3, lambda: False)
    rig.watchdog.trip()
    rig.watchdog.trip()
    assert rig.released == [3]
    rig.watch(4)
    assert rig.waits == [3]


def test_nothing_is_let_go_when_nothing_waits(rig: Rig) -> None:
    rig.watch(3)
    rig.watchdog.disarm(3)
    rig.watchdog.trip()
    assert rig.released == []


def test_its_thread_sees_a_missed_deadline_by_itself_and_says_so_after_the_release() -> None:
    order: list[str] = []
    done = threading.Event()

    def on_missed() -> None:
        order.append("missed")
        done.set()

    watchdog = Watchdog(lambda sequence: order.append(f"released {sequence}"), 0.05, on_missed)
    watchdog.start()
    # First idle, so that a wait has to wake it.
    assert not done.wait(0.1)
    watchdog.watch(1, lambda: True, lambda: lambda: False)
    watchdog.disarm(1)
    watchdog.watch(2, lambda: True, lambda: lambda: len(order) > 4)
    assert done.wait(5)
    watchdog._thread.join(5)
    assert not watchdog._thread.is_alive()
    assert order == ["released 2", "missed", "released 2", "released 2", "released 2"]


def test_its_thread_ends_with_the_peer() -> None:
    watchdog = Watchdog(lambda sequence: None, 30.0, lambda: None)
    watchdog.start()
    watchdog.trip()
    watchdog._thread.join(5)
    assert not watchdog._thread.is_alive()
