"""What must hold for the draft by kernels, on any device and element type."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.embedding import SharedWeights
from common.layers.attention import slot_index
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_weights import DFlashLayer, DFlashWeights, Draft
from services.drafter.model.kernel_dflash import KernelDFlash
from tests.kernel_checks.paged_rows import Pages, for_kernels, for_torch
from tests.paged_runs import Piece

# Of the norm of what is stored, against the same weights in fp32: see kernel_llama.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2.5e-2}
# How far below the highest logit a chosen token's may lie, in deviations of the logits.
LOGIT_GAP = {torch.float32: 5e-4, torch.bfloat16: 0.15}


def widened(draft: Draft) -> Draft:
    """The same draft in fp32."""
    w = draft.weights
    layers = [DFlashLayer(**{name: t.float() for name, t in vars(layer).items()}) for layer in w.layers]
    return replace(
        draft, weights=DFlashWeights(w.fc.float(), w.hidden_norm.float(), w.norm.float(), layers)
    )


def liven_norms(draft: Draft, seed: int) -> None:
    """Norm weights unlike 1, so that a forgotten or exchanged one shows."""
    generator = torch.Generator().manual_seed(seed)
    for layer in draft.weights.layers:
        for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
            norm.add_(0.2 * torch.randn(norm.shape, generator=generator).to(norm))


class Rig:
    """One draft by kernels and, in fp32, by torch: each with its own cache over the same pages."""

    def __init__(
        self, draft: Draft, shared: SharedWeights, contexts: tuple[int, ...], page_size: int
    ) -> None:
        c, block = draft.config, draft.config.block_size
        self.config, self.draft_tokens, self.page_size = c, block - 1, page_size
        self.device, self.dtype = str(shared.embedding.device), shared.embedding.dtype
        longest = max(contexts) + block
        self.pages = Pages(len(contexts) * -(-longest // page_size), page_size, seed=9)
        self.kernels = KernelDFlash(
            draft, shared, page_size=page_size,
            num_rows_max=max(sum(contexts), (len(contexts) + 1) * block), num_keys_max=longest,
            max_positions=longest,
        )  # fmt: skip
        wide = SharedWeights(shared.embedding.float(), shared.lm_head.float(), shared.fingerprint)
        as_fp32 = widened(draft)
        self.torch = DFlash(c, as_fp32.weights, wide, draft.rope, draft.contract)
        shape = (c.num_layers, 2, self.pages.pool.num_slots, c.num_kv_heads, c.head_dim)
        # NaN from somebody before: a key read too many shows.
        self.kernel_kv = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        self.torch_kv = torch.full(shape, float("nan"), device=self.device)

    def append(self, owner: int, start: int, captured: torch.Tensor) -> torch.Tensor:
        """Rows `[n, T * H]` at start …; returns the kernels' flags `[n, num_layers]`."""
        stop = start + len(captured)
        slots = self.pages.table(owner, stop).slots(start, stop)
        positions = torch.arange(start, stop, device=self.device)
        on_device = torch.tensor(slots, dtype=torch.int32, device=self.device)
        context_kv = captured.new_full((len(captured), self.kernels.context_kv_width), float("nan"))
        finite = torch.full((len(captured), self.config.num_layers), 7, dtype=torch.uint8, device=self.device)
        self.kernels.project_context(captured, context_kv)
        self.kernels.store(context_kv, positions.int(), on_device, self.kernel_kv, finite)
        with torch.inference_mode():
            self.torch.append_context(captured.float(), positions, slot_index(slots), self.torch_kv)
        return finite

    def draft(self, blocks: list[Piece], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels' ids `[S, K]`, and torch's logits `[S, K, V]`."""
        c = self.config
        rows = for_kernels(
            self.pages, blocks, self.device, group=c.num_heads // c.num_kv_heads, dtype=self.dtype,
            padding=padding, ragged=False,
        )  # fmt: skip
        block_ids = torch.tensor([piece.ids for piece in blocks]).flatten().to(self.device)
        ids = torch.zeros_like(rows.positions)
        ids[: len(block_ids)] = block_ids
        chosen = torch.full(
            (len(blocks) + padding, self.draft_tokens), -1, dtype=torch.int32, device=self.device
        )
        self.kernels.draft(ids, self.kernel_kv, rows, chosen)
        assert ((chosen >= 0) & (chosen < c.vocab_size)).all(), "an id outside the vocabulary"
        with torch.inference_mode():
            batch = for_torch(self.pages, blocks, self.device)
            hidden = self.torch.block_hidden(block_ids, self.torch_kv, batch)
            logits = self.torch.logits(hidden.view(len(blocks), c.block_size, -1)[:, 1:])
        return chosen[: len(blocks)], logits


def captured_rows(rig: Rig, count: int, generator: torch.Generator) -> torch.Tensor:
    width = len(rig.config.captured_layer_ids) * rig.config.hidden_size
    return torch.randn(count, width, generator=generator).to(rig.device, rig.dtype)


def check_contexts_and_drafts_equal_torch(
    draft: Draft, shared: SharedWeights, seed: int, contexts: tuple[int, ...], page_size: int
) -> None:
    """Contexts of these lengths appended in two parts each, a block after each, then one more part over the
    block's first rows and a block after that; caches and drafts, beside padding."""
    rig = Rig(draft, shared, tuple(n + 2 for n in contexts), page_size)
    generator = torch.Generator().manual_seed(seed)
    size, c = rig.config.block_size, rig.config
    for lengths in (contexts, [n + 2 for n in contexts]):
        for owner, length in enumerate(lengths):
            first = length - 2 if lengths is not contexts else 0
            cut = first + (length - first) // 2
            for start, stop in ((first, cut), (cut, length)):
                assert rig.append(owner, start, captured_rows(rig, stop - start, generator)).eq(1).all()
        anchors = torch.randint(c.vocab_size, (len(contexts),), generator=generator).tolist()
        blocks = [
            _block(owner, [anchor] + [c.mask_token_id] * (size - 1), length)
            for owner, (anchor, length) in enumerate(zip(anchors, lengths, strict=True))
        ]
        chosen, logits = rig.draft(blocks, padding=1)
        gaps = logits.amax(-1) - logits.gather(-1, chosen.long().unsqueeze(-1)).squeeze(-1)
        assert gaps.max() <= LOGIT_GAP[rig.dtype] * logits.std(), f"{float(gaps.max())} below the highest"
        slots = rig.pages.kept_slots({i: n + size for i, n in enumerate(lengths)}).to(rig.device)
        ours, theirs = rig.kernel_kv[:, :, slots].double(), rig.torch_kv[:, :, slots].double()
        error = float((ours - theirs).norm() / theirs.norm())
        assert error <= TOLERANCE[rig.dtype], f"K/V off by {error:.2e} of the norm"


def check_a_wild_row_is_flagged_alone(draft: Draft, shared: SharedWeights, seed: int) -> None:
    rig = Rig(draft, shared, (8,), page_size=4)
    for wild in (float("nan"), float("inf")):
        rows = captured_rows(rig, 6, torch.Generator().manual_seed(seed))
        rows[2, 5] = wild
        finite = rig.append(0, 0, rows)
        assert finite.cpu().tolist() == [[int(i != 2)] * rig.config.num_layers for i in range(6)]


def _block(owner: int, ids: list[int], start: int) -> Piece:
    """A piece whose ids are those of its rows only."""
    return Piece(owner, ids, start + len(ids), start=start)
