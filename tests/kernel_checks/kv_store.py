"""What must hold for the kernels that store K/V, on any device and element type."""

from __future__ import annotations

import torch

from common.kernels.kv_store import store_context, store_qkv
from tests.kernel_checks.closeness import assert_close
from tests.reference.kernels.kv_store import norm_and_rotate, split_qkv

EPS = 1e-5
UNTOUCHED = 77.0
MAX_POSITIONS = 300


def rope_table(head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(MAX_POSITIONS).float(), frequencies).repeat(1, 2)
    return angles.cos().to(device), angles.sin().to(device)


def check_qkv_is_normed_rotated_and_stored(
    device: str, dtype: torch.dtype, seed: int, heads: tuple[int, int, int], *, normed: bool
) -> None:
    """heads: num_heads, num_kv_heads, head_dim. Slots that no row names stay as they were."""
    num_heads, num_kv_heads, head_dim = heads
    rng = torch.Generator().manual_seed(seed)
    num_rows, num_slots = 5, 40
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=rng).to(device, dtype)
    positions = torch.randint(0, MAX_POSITIONS, (num_rows,), generator=rng).to(device)
    slots = torch.randperm(num_slots, generator=rng)[:num_rows].to(device)
    q_norm, k_norm = (
        (torch.rand(head_dim, generator=rng) + 0.5).to(device, dtype) if normed else None for _ in range(2)
    )
    cos, sin = rope_table(head_dim, device)
    q_out = torch.full((num_rows, num_heads, head_dim), UNTOUCHED, dtype=dtype, device=device)
    k_cache, v_cache = (
        torch.full((num_slots, num_kv_heads, head_dim), UNTOUCHED, dtype=dtype, device=device)
        for _ in range(2)
    )
    store_qkv(qkv, positions, slots, cos, sin, q_norm, k_norm, q_out, k_cache, v_cache, eps=EPS)

    q, k, v = split_qkv(qkv, num_heads, num_kv_heads, head_dim)
    assert_close(q_out, norm_and_rotate(q, q_norm, cos[positions], sin[positions], EPS), dtype)
    assert_close(k_cache[slots], norm_and_rotate(k, k_norm, cos[positions], sin[positions], EPS), dtype)
    assert torch.equal(v_cache[slots], v)
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots] = False
    assert (k_cache[others] == UNTOUCHED).all() and (v_cache[others] == UNTOUCHED).all()

    # The same rows one at a time give the same bits.
    for row in range(num_rows):
        one = slice(row, row + 1)
        q_one, k_one, v_one = q_out[one].clone().zero_(), k_cache.clone().zero_(), v_cache.clone().zero_()
        store_qkv(
            qkv[one], positions[one], slots[one], cos, sin, q_norm, k_norm, q_one, k_one, v_one, eps=EPS
        )
        assert torch.equal(q_one, q_out[one])
        assert torch.equal(k_one[slots[one]], k_cache[slots[one]])


def check_values_that_are_not_finite_move_into_the_key(device: str, dtype: torch.dtype, seed: int) -> None:
    """V of one head of one row is spoiled: its K becomes NaN, its V zero, and nothing else changes."""
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    rng = torch.Generator().manual_seed(seed)
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim, generator=rng).to(device, dtype)
    cos, sin = rope_table(head_dim, device)
    rows = torch.arange(3, device=device)

    def store(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.zeros(3, num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        q_out = torch.empty(3, num_heads, head_dim, dtype=dtype, device=device)
        store_qkv(given, rows, rows, cos, sin, None, None, q_out, k, v)
        return k, v

    k, v = store(qkv)
    for spoil in (float("nan"), float("inf"), float("-inf")):
        wild = qkv.clone()
        wild[1, (num_heads + num_kv_heads + 1) * head_dim + 5] = spoil
        wild_k, wild_v = store(wild)
        assert wild_k[1, 1].isnan().all() and (wild_v[1, 1] == 0).all()
        wild_k[1, 1], wild_v[1, 1] = k[1, 1], v[1, 1]
        assert torch.equal(wild_k, k) and torch.equal(wild_v, v)


def check_context_of_all_layers_is_stored_by_one_launch(
    device: str, dtype: torch.dtype, seed: int, num_layers: int, num_kv_heads: int, head_dim: int
) -> None:
    """Padding rows go to the sentinel slot 0; a row with a number that is not finite is named."""
    rng = torch.Generator().manual_seed(seed)
    num_rows, num_slots = 6, 50
    both = torch.randn(num_rows, num_layers, 2, num_kv_heads, head_dim, generator=rng).to(device, dtype)
    positions = torch.randint(0, MAX_POSITIONS, (num_rows,), generator=rng, dtype=torch.int32).to(device)
    slots = (torch.randperm(num_slots - 1, generator=rng)[:num_rows] + 1).to(device)
    slots[4:] = 0
    both[2, num_layers - 1, 0, 0, 3] = float("inf")
    both[3, 0, 1, num_kv_heads - 1, 7] = float("nan")
    k_norms = (torch.rand(num_layers, head_dim, generator=rng) + 0.5).to(device, dtype)
    cos, sin = rope_table(head_dim, device)
    kv = torch.full(
        (num_layers, 2, num_slots, num_kv_heads, head_dim), UNTOUCHED, dtype=dtype, device=device
    )
    finite = torch.full((num_rows, num_layers), 9, dtype=torch.uint8, device=device)
    store_context(both.flatten(1), positions, slots, cos, sin, k_norms, kv, finite, eps=EPS)

    wanted = torch.ones_like(finite)
    wanted[2, num_layers - 1] = wanted[3, 0] = 0
    assert torch.equal(finite, wanted)
    whole, at = slots[:2], positions[:2].long()
    for layer in range(num_layers):
        k = norm_and_rotate(both[:2, layer, 0], k_norms[layer], cos[at], sin[at], EPS)
        assert_close(kv[layer, 0, whole], k, dtype)
        assert torch.equal(kv[layer, 1, whole], both[:2, layer, 1])
    assert kv[0, 0, slots[3], num_kv_heads - 1].isnan().all()
    assert (kv[0, 1, slots[3], num_kv_heads - 1] == 0).all()
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots] = False
    assert (kv[:, :, others] == UNTOUCHED).all()
