"""Rotary tables: the definition, the scalings, and configurations that are refused by name."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from common.layers.rope import apply_rope, build_rope_table

SEED = 20261216
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_a_pair_of_the_two_halves_turns_by_its_own_angle() -> None:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(5, 3, 8, generator=generator)
    positions = torch.tensor([0, 1, 7, 100, 399])
    rotated = apply_rope(x, *build_rope_table(8, 400, {"rope_theta": 500.0}).at(positions))
    for row, position in enumerate(positions.tolist()):
        for i in range(4):
            turn = complex(math.cos(angle := position * 500.0 ** (-2 * i / 8)), math.sin(angle))
            for head in range(3):
                expected = complex(x[row, head, i], x[row, head, i + 4]) * turn
                assert rotated[row, head, i].item() == pytest.approx(expected.real, abs=1e-4)
                assert rotated[row, head, i + 4].item() == pytest.approx(expected.imag, abs=1e-4)


def test_linear_scaling_stretches_positions() -> None:
    plain = build_rope_table(16, 50, {"rope_theta": 1e4})
    scaled = build_rope_table(16, 200, {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}})
    torch.testing.assert_close(scaled.cos[::4], plain.cos, rtol=0, atol=1e-5)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    config = {"rope_theta": 1e4}
    plain = build_rope_table(64, 3, config).sin[1].asin()
    scaled = build_rope_table(64, 3, config | {"rope_scaling": LLAMA3}).sin[1].asin()
    ratio = (plain / scaled)[:32]
    waves = 2 * math.pi / plain[:32]
    assert ratio[waves < 64 / 4] == pytest.approx(1.0, rel=1e-3)
    assert ratio[waves > 64] == pytest.approx(8.0, rel=1e-3)
    ramp = ratio[(waves > 16) & (waves < 64)]
    assert ((ramp > 1) & (ramp < 8)).all()
    assert torch.equal(ramp, ramp.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_rotated_keeps_its_type(dtype: torch.dtype) -> None:
    """bf16 came back as fp32, which the bf16 KV cache refused: --dtype bfloat16 never ran."""
    table = build_rope_table(8, 4, {"rope_theta": 100.0})
    assert apply_rope(torch.ones(2, 1, 8, dtype=dtype), *table.at(torch.tensor([1, 3]))).dtype == dtype


def test_theta_in_rope_parameters_goes_before_the_top_level() -> None:
    nested = build_rope_table(8, 9, {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 100.0}})
    assert torch.equal(nested.cos, build_rope_table(8, 9, {"rope_theta": 100.0}).cos)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -5.0}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, "rope_parameters/rope_scaling"),
        ({"rope_theta": 1e4, "rope_scaling": ["linear"]}, "rope_parameters/rope_scaling"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling.rope_type"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        *(
            ({"rope_theta": 1e4, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != missing}}, missing)
            for missing in LLAMA3 if missing != "rope_type"
        ),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_by_its_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_rope_table(8, 16, config)
    assert caught.value.field == field


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match="head_dim: must be even"):
        build_rope_table(random.Random(SEED).randrange(3, 99, 2), 16, {"rope_theta": 1e4})
