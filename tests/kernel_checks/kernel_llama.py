"""What must hold for the target's forward by kernels, on any device and element type."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from services.target.model.kernel_llama import KernelLlama
from services.target.model.llama import Llama, LlamaWeights
from tests.kernel_checks.paged_rows import Pages, for_kernels, for_torch
from tests.paged_runs import Piece

# Of the norm, against the same weights in fp32. Sums of fp32 differ in order alone: 5e-7 in the interpreter,
# and some 1e-5 over thousands of columns. bf16 rounds at 10 places a layer: torch's own forward of 4 layers
# is off by 1.3e-2.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Sizes:
    """Lengths of a check: of prompts and the chunks they are cut into, rows of a verify."""

    prompts: tuple[int, ...]
    chunks: tuple[int, ...]
    block: int
    page_size: int
    row_independent: bool = False


def widened(weights: LlamaWeights) -> LlamaWeights:
    """The same weights in fp32."""

    def wide(holder: Any) -> Any:
        tensors = {f.name: getattr(holder, f.name) for f in fields(holder)}
        return replace(holder, **{n: t.float() for n, t in tensors.items() if isinstance(t, torch.Tensor)})

    layers = [wide(layer) for layer in weights.layers]
    return replace(
        weights, layers=layers, shared=wide(weights.shared), final_norm=weights.final_norm.float()
    )


def liven_norms(weights: LlamaWeights, seed: int) -> None:
    """Norm weights unlike 1, so that a forgotten or exchanged one shows."""
    generator = torch.Generator().manual_seed(seed)
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.add_(0.2 * torch.randn(norm.shape, generator=generator).to(norm))


class Rig:
    """One model by kernels and, in fp32, by torch: each with its own cache over the same pages."""

    def __init__(self, weights: LlamaWeights, sizes: Sizes, num_rows_max: int) -> None:
        c = weights.config
        self.sizes, self.config, self.page_size = sizes, c, sizes.page_size
        self.device = str(weights.final_norm.device)
        self.dtype = weights.final_norm.dtype
        longest = max(sizes.prompts) + 4 * sizes.block
        self.pages = Pages(len(sizes.prompts) * -(-longest // sizes.page_size), sizes.page_size, seed=7)
        self.kernels = KernelLlama(
            weights, page_size=sizes.page_size, num_rows_max=num_rows_max, num_keys_max=longest,
            max_positions=longest, row_independent=sizes.row_independent,
        )  # fmt: skip
        self.torch = Llama(widened(weights))
        shape = (c.num_layers, 2, self.pages.pool.num_slots, c.num_kv_heads, c.head_dim)
        # NaN from somebody before: a key read too many shows.
        self.kernel_kv = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        self.torch_kv = torch.full(shape, float("nan"), device=self.device)

    def run_kernels(
        self, step: list[Piece], taps: tuple[int, ...] = (), *, padding: int = 0, ragged: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and captured states of a step's rows, those of padding left out."""
        c = self.config
        rows = for_kernels(
            self.pages, step, self.device, group=c.num_heads // c.num_kv_heads, dtype=self.dtype,
            padding=padding, ragged=ragged,
        )  # fmt: skip
        ids = torch.zeros_like(rows.positions)
        num_rows = sum(piece.num_rows for piece in step)
        ids[:num_rows] = torch.tensor([t for piece in step for t in piece.ids[piece.start : piece.stop]])

        def out(width: int) -> torch.Tensor:
            return torch.full((len(ids), width), float("nan"), dtype=self.dtype, device=self.device)

        hidden, captured, logits = (
            out(width) for width in (c.hidden_size, len(taps) * c.hidden_size, self.kernels.vocab_rows)
        )
        self.kernels.forward(ids, self.kernel_kv, rows, hidden, captured if taps else None, taps)
        self.kernels.logits(hidden, logits)
        return logits[:num_rows], captured[:num_rows]

    @torch.inference_mode()
    def run_torch(self, step: list[Piece], taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([t for piece in step for t in piece.ids[piece.start : piece.stop]])
        batch = for_torch(self.pages, step, self.device)
        hidden, captured = self.torch.forward(ids.to(self.device), self.torch_kv, batch, taps)
        assert captured is not None
        return self.torch.logits(hidden), captured

    def sequences(self, seed: int) -> list[list[int]]:
        """Tokens of each prompt and of what follows it."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(self.sizes.prompts) + 4 * self.sizes.block
        ids = torch.randint(self.config.vocab_size, (len(self.sizes.prompts), longest), generator=generator)
        return ids.tolist()


def prefill_steps(sizes: Sizes, sequences: list[list[int]]) -> list[list[Piece]]:
    """Prompts in chunks of odd lengths, several in a step and out of step with each other."""
    done, steps, turn = [0] * len(sequences), [], 0
    while any(d < n for d, n in zip(done, sizes.prompts, strict=True)):
        step = []
        for i, ids in enumerate(sequences):
            turn += 1
            stop = min(sizes.prompts[i], done[i] + sizes.chunks[turn % len(sizes.chunks)])
            if stop > done[i]:
                step.append(Piece(i, ids, stop, start=done[i]))
                done[i] = stop
        steps.append(step)
    return steps


def check_equals_torch(weights: LlamaWeights, seed: int, sizes: Sizes) -> None:
    """Ragged prompt chunks, then two blocks to verify of which the second replaces most of the first, then
    single rows: logits, captured states and caches, padding beside them."""
    rig = Rig(weights, sizes, num_rows_max=sum(sizes.prompts) + (len(sizes.prompts) + 2) * sizes.block)
    sequences = rig.sequences(seed)
    wrong = [ids[::-1] for ids in sequences]
    taps, block = (rig.config.num_layers - 1, 0), sizes.block

    def pieces(tokens: list[list[int]], offset: int, count: int) -> list[Piece]:
        starts = [n + offset for n in sizes.prompts]
        return [Piece(i, tokens[i], s + count, start=s) for i, s in enumerate(starts)]

    steps = [(step, True) for step in prefill_steps(sizes, sequences)]
    steps += [(pieces(wrong, 0, block), False), (pieces(sequences, 1, block), False)]
    steps += [(pieces(sequences, block + 1, 1), False)]
    for step, ragged in steps:
        got, wanted = rig.run_kernels(step, taps, padding=2, ragged=ragged), rig.run_torch(step, taps)
        for name, ours, theirs in zip(("logits", "captured"), got, wanted, strict=True):
            _assert_near(f"{name} of {[p.num_rows for p in step]} rows", ours, theirs, rig.dtype)
    slots = rig.pages.kept_slots({i: n + block + 2 for i, n in enumerate(sizes.prompts)}).to(rig.device)
    _assert_near("K/V", rig.kernel_kv[:, :, slots], rig.torch_kv[:, :, slots], rig.dtype)
    others = torch.ones(rig.pages.pool.num_slots, dtype=torch.bool)
    others[slots.cpu()] = False
    others[: sizes.page_size] = False
    assert rig.kernel_kv[:, :, others.to(rig.device)].isnan().all(), "a slot that no row names was written"


def check_a_rows_bits_do_not_depend_on_its_company(weights: LlamaWeights, seed: int, sizes: Sizes) -> None:
    """All sequences verify a block at once; then the first and the last alone, also row by row."""
    assert sizes.row_independent
    rig = Rig(weights, sizes, num_rows_max=sum(sizes.prompts) + len(sizes.prompts) * sizes.block)
    sequences, taps = rig.sequences(seed), (0, 1)
    for step in prefill_steps(sizes, sequences):
        rig.run_kernels(step, ragged=True)
    starts = sizes.prompts
    blocks = [
        Piece(i, ids, starts[i] + sizes.block, start=starts[i]) for i, ids in enumerate(sequences)
    ]
    together = rig.run_kernels(blocks, taps)
    cached = rig.kernel_kv[:, :, sizes.page_size :].nan_to_num()
    for i in (0, len(blocks) - 1):
        rows = slice(i * sizes.block, (i + 1) * sizes.block)
        alone = rig.run_kernels([blocks[i]], taps)
        singles = [
            rig.run_kernels([Piece(i, sequences[i], start + 1, start=start)], taps)
            for start in range(starts[i], starts[i] + sizes.block)
        ]
        for kind in (0, 1):
            assert torch.equal(alone[kind], together[kind][rows]), f"sequence {i} alone"
            in_turn = torch.cat([single[kind] for single in singles])
            assert torch.equal(in_turn, together[kind][rows]), f"rows of sequence {i} in turn"
    assert torch.equal(rig.kernel_kv[:, :, sizes.page_size :].nan_to_num(), cached)


def _assert_near(name: str, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    assert error <= TOLERANCE[dtype], f"{name}: off by {error:.2e} of the norm"
