"""Paged attention against the formula: ragged batches, scattered pages, neighbours that hold NaN."""

from __future__ import annotations

import random

import pytest
import torch

from common.layers.attention import (
    BIDIRECTIONAL,
    CAUSAL,
    Mask,
    RaggedBatch,
    Span,
    key_slots,
    paged_attention,
    slot_index,
)
from tests.reference.naive_attention import naive_attention

SEED = 20261208


MASKS = [CAUSAL, BIDIRECTIONAL, Mask(True, window=5), Mask(False, window=5)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_a_ragged_batch_over_scattered_pages_equals_the_formula(
    mask: Mask, num_heads: int, num_kv_heads: int
) -> None:
    rng, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    head_dim, page_size = 8, 4
    spans, queries, expected, start = [], [], [], 0
    free = rng.sample(range(1, 61), 60)
    cache = torch.full((2, 61 * page_size, num_kv_heads, head_dim), float("nan"))
    for num_rows, num_keys in [(1, 1), (1, 30), (8, 8), (5, 23), (3, 4), (7, 40)]:
        pages = tuple(free.pop() for _ in range(-(-num_keys // page_size)))
        slots = key_slots(pages, page_size, num_keys)
        k, v = torch.randn(2, num_keys, num_kv_heads, head_dim, generator=generator)
        cache[0][slots], cache[1][slots] = k, v
        q = torch.randn(num_rows, num_heads, head_dim, generator=generator)
        spans.append(Span(start, start + num_rows, slots, num_keys))
        queries.append(q)
        expected.append(naive_attention(q, k, v, 0.3, causal=mask.causal, window=mask.window))
        start += num_rows
    batch = RaggedBatch(torch.empty(0), torch.empty(0), spans)
    out = paged_attention(torch.cat(queries), cache[0], cache[1], batch, mask, 0.3)
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pages", [(3,), (3, 4, 5), (5, 3, 4), (4, 3), (1, 3)])
def test_key_slots_are_the_slots_of_the_pages_in_order(pages: tuple[int, ...]) -> None:
    size = 4
    for num_keys in range(1, len(pages) * size + 1):
        slots = key_slots(pages, size, num_keys)
        expected = [page * size + offset for page in pages for offset in range(size)][:num_keys]
        assert torch.arange(100)[slots].tolist() == expected
        assert isinstance(slots, slice) == (expected == list(range(expected[0], expected[0] + num_keys)))


def test_neighbouring_slots_are_read_as_a_slice_and_others_by_index() -> None:
    assert slot_index([7, 8, 9]) == slice(7, 10)
    assert slot_index([4]) == slice(4, 5)
    for slots in ([7, 9], [8, 7], [7, 9, 8, 10], [5, 5]):
        index = slot_index(slots)
        assert isinstance(index, torch.Tensor)
        assert index.tolist() == slots
