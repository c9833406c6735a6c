"""What must hold for the attention kernel, on any device and element type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.kernels.paged_attention import AttentionWorkspace, RaggedRows, paged_attention, row_tiles
from tests.kernel_checks.closeness import assert_close
from tests.reference.kernels.paged_attention import paged_attention as reference
from tests.reference.kernels.paged_attention import slots_of

UNTOUCHED = 77.0


@dataclass(frozen=True)
class Shape:
    """heads, kv_heads, head_dim of a model; page_size of its cache."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16


@dataclass
class Cached:
    """Sequences in a paged cache whose every other slot holds NaN, so that a read too many shows.

    Pages are shuffled; places of the page table behind a sequence's end name a page of NaN.
    """

    shape: Shape
    kv_lens: list[int]
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    workspace: AttentionWorkspace

    @classmethod
    def build(
        cls, kv_lens: list[int], shape: Shape, device: str, dtype: torch.dtype, rng: torch.Generator
    ) -> Cached:
        each = [-(-kv_len // shape.page_size) for kv_len in kv_lens]
        # Page 0 is the sentinel, the last one is nobody's.
        pages = torch.randperm(sum(each), generator=rng) + 1
        poisoned = sum(each) + 1
        table = torch.full((len(kv_lens), max(each) + 2), poisoned, dtype=torch.int32)
        for sequence, own in enumerate(pages.split(each)):
            table[sequence, : len(own)] = own
        size = ((poisoned + 1) * shape.page_size, shape.kv_heads, shape.head_dim)
        k, v = torch.full(size, float("nan")), torch.full(size, float("nan"))
        for sequence, kv_len in enumerate(kv_lens):
            slots = slots_of(table[sequence], shape.page_size, kv_len)
            k[slots] = torch.randn(kv_len, *size[1:], generator=rng) * 1.5
            v[slots] = torch.randn(kv_len, *size[1:], generator=rng)
        return cls(
            shape,
            kv_lens,
            k.to(device, dtype),
            v.to(device, dtype),
            table.to(device),
            AttentionWorkspace.allocate(max(kv_lens) + 64, shape.head_dim, dtype, device),
        )

    def queries(self, num_rows: int, rng: torch.Generator) -> torch.Tensor:
        q = torch.randn(num_rows, self.shape.heads, self.shape.head_dim, generator=rng) * 1.5
        return q.to(self.k.device, self.k.dtype)

    def attend(
        self, q: torch.Tensor, num_rows: list[int], kv_lens: list[int] | None = None,
        sequences: list[int] | None = None, *, ragged: bool = False, causal: bool = True,
        window: int | None = None, split: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of the named sequences (all), as if they had kv_lens keys (all they have)."""
        device, kv_lens = self.k.device, self.kv_lens if kv_lens is None else kv_lens
        table = self.page_table if sequences is None else self.page_table[sequences]
        rows: int | RaggedRows = num_rows[0]
        if ragged:
            starts = torch.tensor([0, *num_rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            group = self.shape.heads // self.shape.kv_heads
            tiles = [*row_tiles(num_rows, group, q.dtype), (-1, 0)]
            rows = RaggedRows(starts.to(device), torch.tensor(tiles, dtype=torch.int32, device=device))
        out = torch.full_like(q, UNTOUCHED)
        paged_attention(
            q, self.k, self.v, table, torch.tensor(kv_lens, dtype=torch.int32, device=device), out,
            self.workspace, rows=rows, page_size=self.shape.page_size, scale=self.shape.head_dim**-0.5,
            causal=causal, window=window, split=split,
        )  # fmt: skip
        return out

    def expected(
        self, q: torch.Tensor, num_rows: list[int], causal: bool, window: int | None
    ) -> torch.Tensor:
        return reference(
            q, self.k, self.v, self.page_table, self.kv_lens, num_rows, page_size=self.shape.page_size,
            scale=self.shape.head_dim**-0.5, causal=causal, window=window,
        )  # fmt: skip


def check_uniform_rows(
    device: str, dtype: torch.dtype, seed: int, shape: Shape, rows: int, kv_lens: list[int], *,
    causal: bool, window: int | None, split: bool,
) -> None:  # fmt: skip
    """Every sequence has the same number of rows; those with kv_len 0 are padding and stay untouched."""
    rng = torch.Generator().manual_seed(seed)
    cached = Cached.build(kv_lens, shape, device, dtype, rng)
    num_rows = [rows] * len(kv_lens)
    q = cached.queries(sum(num_rows), rng)
    out = cached.attend(q, num_rows, causal=causal, window=window, split=split)
    lives = torch.tensor(kv_lens, device=device).repeat_interleave(rows) > 0
    assert_close(out[lives], cached.expected(q, num_rows, causal, window)[lives], dtype)
    assert (out[~lives] == UNTOUCHED).all()


def check_ragged_rows(
    device: str, dtype: torch.dtype, seed: int, shape: Shape, num_rows: list[int], kv_lens: list[int], *,
    window: int | None, split: bool | None,
) -> None:  # fmt: skip
    """Prompt chunks beside single rows."""
    rng = torch.Generator().manual_seed(seed)
    cached = Cached.build(kv_lens, shape, device, dtype, rng)
    q = cached.queries(sum(num_rows), rng)
    out = cached.attend(q, num_rows, ragged=True, window=window, split=split)
    assert_close(out, cached.expected(q, num_rows, True, window), dtype)


def check_bits_of_a_row(
    device: str, dtype: torch.dtype, seed: int, shape: Shape, rows: int, kv_lens: list[int],
    window: int | None = None,
) -> None:  # fmt: skip
    """A row's bits are the same in a block, alone, in a batch, in a prompt chunk, split and not."""
    rng = torch.Generator().manual_seed(seed)
    cached = Cached.build(kv_lens, shape, device, dtype, rng)
    num_rows = [rows] * len(kv_lens)
    q = cached.queries(sum(num_rows), rng)
    together = cached.attend(q, num_rows, split=False, window=window)
    assert torch.equal(together, cached.attend(q, num_rows, split=True, window=window)), "split"
    ragged = cached.attend(q, num_rows, ragged=True, split=False, window=window)
    assert torch.equal(together, ragged), "ragged"
    for sequence, kv_len in enumerate(kv_lens):
        mine = slice(sequence * rows, (sequence + 1) * rows)
        alone = cached.attend(q[mine].contiguous(), [rows], [kv_len], [sequence], window=window)
        assert torch.equal(together[mine], alone), f"sequence {sequence} alone"
        for row in range(rows):
            at = sequence * rows + row
            single = cached.attend(
                q[at : at + 1], [1], [kv_len - rows + row + 1], [sequence], split=bool(row % 2), window=window
            )
            assert torch.equal(together[at : at + 1], single), f"row {row} of sequence {sequence} alone"


def check_wild_keys_reach_only_rows_that_see_them(
    device: str, dtype: torch.dtype, seed: int, shape: Shape
) -> None:
    """The keys of the block's last rows are NaN (and V zero, as kv_store leaves them)."""
    rng = torch.Generator().manual_seed(seed)
    rows, wild = 8, 3
    cached = Cached.build([150], shape, device, dtype, rng)
    q = cached.queries(rows, rng)
    for split in (False, True):
        before = cached.attend(q, [rows], split=split)
        clean_k, clean_v = cached.k.clone(), cached.v.clone()
        slots = slots_of(cached.page_table[0], shape.page_size, 150)[-wild:]
        cached.k[slots], cached.v[slots] = float("nan"), 0.0
        after = cached.attend(q, [rows], split=split)
        assert torch.equal(after[:-wild], before[:-wild])
        assert after[-wild:].isnan().all()
        cached.k, cached.v = clean_k, clean_v


def check_repetition(
    device: str, dtype: torch.dtype, seed: int, shape: Shape, rows: int, kv_lens: list[int], times: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    cached = Cached.build(kv_lens, shape, device, dtype, rng)
    num_rows = [rows] * len(kv_lens)
    q = cached.queries(sum(num_rows), rng)
    first = cached.attend(q, num_rows, split=True)
    again = torch.stack([cached.attend(q, num_rows, split=True) for _ in range(times)])
    assert (again == first).all()
