"""What `small_gemm` must do, on whichever device it is run."""

from __future__ import annotations

import torch

from common.kernels.gemm_plans import GemmPlan, Tile, plan_for
from common.kernels.small_gemm import GemmWorkspace, small_gemm
from tests.reference.kernels import small_gemm as reference

# ‖out − ref‖ / ‖ref‖: rounding of the result, and of sums in fp32.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def tiles(device: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """For sizes of batch, each cut differently; the interpreter and fp32 want them small."""
    if device == "cpu":
        return (Tile(16, 32, 4, 1), Tile(32, 16, 8, 1))
    if dtype == torch.float32:
        return (Tile(64, 32, 16, 2), Tile(32, 32, 32, 2))
    return (
        Tile(64, 64, 16, 3, prefetch_k=128),
        Tile(64, 128, 32, 3),
        Tile(128, 64, 64, 3, prefetch_k=1 << 20),
        Tile(128, 64, 128, 3, num_warps=8),
    )


def workspace(device: str) -> GemmWorkspace:
    space = GemmWorkspace.allocate(1 << 22, 1 << 10, device)
    space.partials.fill_(float("nan"))
    return space


def gaussian(rng: torch.Generator, device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(device, dtype)


def guarded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows inside a larger buffer of NaN, so that a row lies apart from the next."""
    wide = rows.new_full((rows.shape[0] + 3, rows.shape[1] + 16), float("nan"))
    wide[: rows.shape[0], : rows.shape[1]] = rows
    return wide[: rows.shape[0], : rows.shape[1]]


def off_by(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


def check_equals_reference(device: str, dtype: torch.dtype, seed: int, *, pdl: bool = False) -> None:
    rng = torch.Generator().manual_seed(seed)
    space = workspace(device)
    for num_rows in (1, 3, 19) if device == "cpu" else (1, 3, 16, 21, 33, 64, 100, 150, 300):
        for n, k, split in ((48, 64, 1), (40, 144, 1), (56, 400, 3)) if device == "cpu" else (
            (576, 576, 1), (960, 576, 1), (200, 208, 1), (576, 1536, 4), (1024, 1536, 3), (264, 1168, 5),
        ):  # fmt: skip
            plan = GemmPlan(split, tiles(device, dtype))
            x = guarded(gaussian(rng, device, dtype, num_rows, k))
            weight = gaussian(rng, device, dtype, n, k)
            out = guarded(torch.full((num_rows, n), float("nan"), dtype=dtype, device=device))
            small_gemm(x, weight, out, space, plan, pdl=pdl)
            assert off_by(out, reference.small_gemm(x, weight)) < TOLERANCE[dtype], (num_rows, n, k, split)
            whole = out.as_strided((num_rows + 3, n + 16), out.stride())
            assert whole[:, n:].isnan().all() and whole[num_rows:].isnan().all()
            assert not space.arrivals.any()


def check_rows_are_independent(
    device: str, dtype: torch.dtype, seed: int, *, split: int, pdl: bool = False
) -> None:
    """A row's bits are the same alone, at another place, among others, and under another tile."""
    rng = torch.Generator().manual_seed(seed)
    cut = tiles(device, dtype)
    # Products in fp32, without matrix instructions, are added in an order that depends on the tile.
    plan = GemmPlan(split, cut[:1] if dtype == torch.float32 else cut)
    n, k, most = (48, 384, 9) if device == "cpu" else (1024, 2048, 150)
    x = gaussian(rng, device, dtype, most, k)
    weight = gaussian(rng, device, dtype, n, k)
    space = workspace(device)

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_full((rows.shape[0], n), float("nan"))
        small_gemm(rows, weight, out, space, plan, pdl=pdl)
        return out

    together = product(x)
    for num_rows in (1, 2, 4, 5) if device == "cpu" else (1, 2, 8, 16, 17, 32, 33, 64, 65, 128):
        first = int(torch.randint(0, most - num_rows + 1, (), generator=rng))
        apart = product(x[first : first + num_rows])
        assert torch.equal(apart, together[first : first + num_rows]), (num_rows, first)


def check_plans_keep_a_rows_bits(device: str, seed: int, shapes: tuple[tuple[int, int], ...]) -> None:
    """Whatever tile a plan takes for a number of rows."""
    for n, k in shapes:
        rng = torch.Generator(device).manual_seed(seed)
        weight = torch.randn(n, k, generator=rng, device=device, dtype=torch.bfloat16)
        x = torch.randn(300, k, generator=rng, device=device, dtype=torch.bfloat16)
        plan = plan_for(n, k, weight.element_size())
        space = GemmWorkspace.allocate(*plan.scratch_for(300, n), device)
        together = torch.full((300, n), float("nan"), dtype=x.dtype, device=device)
        small_gemm(x, weight, together, space, plan, pdl=True)
        for num_rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 200):
            apart = torch.full((num_rows, n), float("nan"), dtype=x.dtype, device=device)
            small_gemm(x[50 : 50 + num_rows], weight, apart, space, plan, pdl=True)
            assert torch.equal(apart, together[50 : 50 + num_rows]), (n, k, num_rows)
