"""Decoder layers by kernels: the GPU form of what both models' forwards spell out in torch.

Owns the activation buffers, allocated once for the most rows, so that every launch can be recorded in a
CUDA graph and all graphs of a stream share them. Imports Triton. Knows rows, slots and pages; nothing of
embeddings, heads or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import CheckpointError
from common.kernels.kv_store import store_qkv
from common.kernels.norm import add_rms_norm
from common.kernels.paged_attention import AttentionWorkspace, RaggedRows, paged_attention
from common.kernels.swiglu import swiglu
from common.layers.attention import Mask
from common.layers.kernel_linear import GemmScratch, KernelLinear


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a layer. CheckpointError when the kernels do not know them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.head_dim < 16 or self.head_dim & (self.head_dim - 1):
            raise CheckpointError("head_dim", "must be a power of two from 16 on a GPU", given=self.head_dim)


@dataclass(frozen=True)
class KernelLayer:
    """Weights of a layer, all of one type on one device; q over k over v and gate over up are stacked.

    q_norm, k_norm `[head_dim]`, both or neither. mask: what its rows see.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    mask: Mask


@dataclass(frozen=True)
class PagedRows:
    """Which rows run, and where their keys lie. All int32 on the device.

    positions, slots `[N]`: absolute position of each row, slot where its K/V is written; padding rows have
    position 0 and slot 0. page_table `[S, P]`: row s for sequence s. kv_lens `[S]`: keys including the rows
    just stored; 0 is padding, whose rows come out as anything. rows: rows of each sequence, or RaggedRows.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    rows: int | RaggedRows


@dataclass(frozen=True)
class _Linears:
    """The four products of a layer."""

    qkv: KernelLinear
    o: KernelLinear
    gate_up: KernelLinear
    down: KernelLinear


class KernelDecoder:
    """A stack of layers. Used from one stream; the K/V storage is the caller's."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: list[KernelLayer],
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        page_size: int,
        num_rows_max: int,
        num_keys_max: int,
        row_independent: bool = False,
        pdl: bool,
    ) -> None:
        """cos, sin `[max_positions, head_dim]` fp32, halves repeated, on the layers' device.

        num_rows_max: rows of a forward; num_keys_max: keys of a sequence. row_independent, pdl: see
        KernelLinear. Allocates 0.24 GB for 2048 rows of Qwen3-8B, and 0.16 GB for attention to 40 k keys.
        """
        dtype, device = layers[0].qkv.dtype, layers[0].qkv.device
        self._shape = shape
        self._layers = layers
        self._cos, self._sin = cos, sin
        self._page_size = page_size
        self._num_rows_max = num_rows_max
        self._pdl = pdl
        self._scratch = scratch = GemmScratch.allocate(
            [weight for layer in layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)],
            num_rows_max=num_rows_max, row_independent=row_independent,
        )  # fmt: skip

        def linear(weight: torch.Tensor) -> KernelLinear:
            return KernelLinear(weight, scratch, row_independent=row_independent, pdl=pdl)

        self._linears = [
            _Linears(linear(layer.qkv), linear(layer.o), linear(layer.gate_up), linear(layer.down))
            for layer in layers
        ]
        self._attention = AttentionWorkspace.allocate(num_keys_max, shape.head_dim, dtype, device)

        def rows_of(*size: int) -> torch.Tensor:
            # Zeros: attention leaves padding rows as they are, and what they hold runs on through the layer.
            return torch.zeros(num_rows_max, *size, dtype=dtype, device=device)

        heads = (shape.num_heads, shape.head_dim)
        self._normed = rows_of(shape.hidden_size)
        self._qkv = rows_of((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self._q, self._mixed = rows_of(*heads), rows_of(*heads)
        self._branch = rows_of(shape.hidden_size)
        self._gate_up = rows_of(2 * shape.intermediate_size)
        self._opened = rows_of(shape.intermediate_size)

    @property
    def num_bytes(self) -> int:
        """Of activations and workspaces."""
        rows = (self._normed, self._qkv, self._q, self._mixed, self._branch, self._gate_up, self._opened)
        split = (self._attention.partial, self._attention.peaks_totals)
        return self._scratch.num_bytes + sum(tensor.nbytes for tensor in (*rows, *split))

    def forward(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        rows: PagedRows,
        norm: torch.Tensor,
        out: torch.Tensor,
        *,
        captured: torch.Tensor | None = None,
        captured_layer_ids: Sequence[int] = (),
    ) -> None:
        """Run rows through all layers, storing their K/V.

        x `[N, H]`: residual stream, changed in place. kv `[num_layers, 2, num_slots, num_kv_heads,
        head_dim]`, contiguous, written at rows.slots. out `[N, H]`: RMS norm, with weight `norm`, of the
        residual after the last layer. captured `[N, T · H]`: the residual after each captured layer, in
        the order of the ids.
        """
        num_rows, hidden = x.shape
        assert num_rows <= self._num_rows_max, f"{num_rows} rows exceed {self._num_rows_max}"
        assert len(captured_layer_ids) == (0 if captured is None else captured.shape[1] // hidden)
        normed, branch = self._normed[:num_rows], self._branch[:num_rows]
        places = {
            layer_id: captured[:, i * hidden : (i + 1) * hidden]
            for i, layer_id in enumerate(captured_layer_ids)
            if captured is not None
        }
        added: torch.Tensor | None = None
        for i, (layer, linears) in enumerate(zip(self._layers, self._linears, strict=True)):
            # The residual after a layer exists once the next norm has added its branch: captured there.
            self._norm(x, added, layer.input_norm, normed, places.get(i - 1))
            self._attend(normed, layer, linears, kv[i], rows, branch)
            self._norm(x, branch, layer.post_norm, normed, None)
            self._feed_forward(normed, linears, branch)
            added = branch
        self._norm(x, added, norm, out, places.get(len(self._layers) - 1))

    def _norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor,
        captured: torch.Tensor | None,
    ) -> None:  # fmt: skip
        add_rms_norm(x, added, weight, out, eps=self._shape.rms_norm_eps, captured=captured, pdl=self._pdl)

    def _attend(
        self, normed: torch.Tensor, layer: KernelLayer, linears: _Linears, kv: torch.Tensor, rows: PagedRows,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        num_rows, shape = normed.shape[0], self._shape
        qkv, q, mixed = self._qkv[:num_rows], self._q[:num_rows], self._mixed[:num_rows]
        k_cache, v_cache = kv[0], kv[1]
        linears.qkv(normed, qkv)
        store_qkv(
            qkv, rows.positions, rows.slots, self._cos, self._sin, layer.q_norm, layer.k_norm, q,
            k_cache, v_cache, eps=shape.rms_norm_eps, pdl=self._pdl,
        )  # fmt: skip
        paged_attention(
            q, k_cache, v_cache, rows.page_table, rows.kv_lens, mixed, self._attention, rows=rows.rows,
            page_size=self._page_size, scale=shape.head_dim**-0.5, causal=layer.mask.causal,
            window=layer.mask.window, pdl=self._pdl,
        )  # fmt: skip
        linears.o(mixed.flatten(1), out)

    def _feed_forward(self, normed: torch.Tensor, linears: _Linears, out: torch.Tensor) -> None:
        num_rows = normed.shape[0]
        gate_up, opened = self._gate_up[:num_rows], self._opened[:num_rows]
        linears.gate_up(normed, gate_up)
        swiglu(gate_up, opened, pdl=self._pdl)
        linears.down(opened, out)
