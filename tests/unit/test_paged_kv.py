"""Pages: conservation, the sentinel, and slots, through random histories."""

from __future__ import annotations

import random

import pytest

from common.paged_kv import OutOfPages, PagePool, PageTable

SEED = 20261214


@pytest.mark.parametrize("round_", range(10))
def test_free_and_owned_pages_are_all_pages_through_a_random_history(round_: int) -> None:
    rng = random.Random(SEED + round_)
    pool = PagePool(rng.randint(1, 40), rng.choice([1, 3, 16]))
    tables = [PageTable(pool) for _ in range(6)]
    wanted = [0] * 6
    for _ in range(600):
        i = rng.randrange(6)
        if rng.random() < 0.3:
            held = tables[i].pages
            assert tables[i].release() == list(held)
            wanted[i] = 0
        else:
            tokens = rng.randint(0, pool.page_size * 12)
            before, free = tables[i].pages, pool.num_free
            missing = tables[i].missing_for(tokens)
            try:
                tables[i].reserve(tokens)
                wanted[i] = max(wanted[i], tokens)
                assert tables[i].pages[: len(before)] == before
            except OutOfPages:
                assert missing > free
                assert (tables[i].pages, pool.num_free) == (before, free), "a refusal took something"
        owned = [page for table in tables for page in table.pages]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(1, pool.num_pages + 1)), "the sentinel or an unknown page was given"
        assert len(owned) + pool.num_free == pool.num_pages
        for table, tokens in zip(tables, wanted, strict=True):
            assert table.capacity >= tokens
            assert table.capacity - tokens < pool.page_size or tokens == 0


def test_slots_of_two_owners_never_meet_and_follow_the_position() -> None:
    pool = PagePool(6, 4)
    a, b = PageTable(pool), PageTable(pool)
    a.reserve(4)
    b.reserve(7)
    a.reserve(9)
    assert a.pages == (1, 4, 5)
    assert a.slots(0, 9) == [4, 5, 6, 7, 16, 17, 18, 19, 20]
    assert a.slots(3, 6) == [7, 16, 17]
    assert a.slots(5, 5) == []
    assert not set(a.slots(0, 12)) & set(b.slots(0, 8))
    assert max(a.slots(0, 12)) < pool.num_slots


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9), (8, 9)])
def test_slots_outside_what_is_reserved_are_refused(start: int, stop: int) -> None:
    table = PageTable(PagePool(4, 4))
    table.reserve(8)
    with pytest.raises(IndexError):
        table.slots(start, stop)


def test_a_page_is_given_back_once_only() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(KeyError):
        pool.free(pages)
    with pytest.raises(KeyError):
        pool.free([0])


def test_an_idle_pool_gives_neighbouring_pages_again_whatever_came_before() -> None:
    rng, pool = random.Random(SEED), PagePool(30, 4)
    tables = [PageTable(pool) for _ in range(5)]
    for table in tables * 3:
        table.reserve(table.capacity + 8)
    for table in rng.sample(tables, 5):
        table.release()
    assert pool.allocate(30) == list(range(1, 31))


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_pages_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        PagePool(num_pages, page_size)


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
