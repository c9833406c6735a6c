"""What the kernels over arrays by lane must do, on whichever device they are run."""

from __future__ import annotations

import random

import numpy as np
import torch

from common.kernels.lanes import HEADER_WORDS, NUM_ENTRIES, NUM_JOINS, LaneState, StagedRows, apply_updates
from common.kernels.sampling import min_p_reach
from services.target.core.control_buffer import join_words
from services.target.core.request import SamplingParams
from tests.reference.kernels import lanes as reference

VOCAB, PAGE_SIZE = 50, 4
# More than a program copies at once, and no multiple of it.
WIDE_TABLE = 1500


def some_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]), seed=rng.choice([0, 1, 2**63, 2**64 - 1, rng.randrange(2**64)]),
    )  # fmt: skip


def some_lanes(rng: random.Random, num_lanes: int, num_pages_each: int, device: str) -> LaneState:
    """Random lanes, and the sentinel as it is made."""
    lanes = LaneState.allocate(num_lanes, num_pages_each, device)

    def ints(*shape: int, high: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(rng.randrange(2**32)).integers(1, high, shape))

    lanes.anchors[:-1] = ints(num_lanes, high=VOCAB).int()
    lanes.positions[:-1] = ints(num_lanes, high=min(300, num_pages_each * PAGE_SIZE - 20)).int()
    lanes.page_table[:-1] = ints(num_lanes, num_pages_each, high=9000).int()
    for lane in range(num_lanes):
        sampling = some_sampling(rng)
        lanes.temperature[lane], lanes.top_k[lane] = sampling.temperature, sampling.top_k
        lanes.top_p[lane], lanes.min_p_reach[lane] = sampling.top_p, min_p_reach(sampling.min_p)
        lanes.seed[lane] = signed(sampling.seed)
    return lanes


def signed(seed: int) -> int:
    """The int64 of a seed's 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def poisoned_rows(num_rows: int, num_sequences: int, num_pages_each: int, device: str) -> StagedRows:
    staged = StagedRows.allocate(num_rows, num_sequences, num_rows, num_pages_each, device)
    p = staged.params
    for tensor in (
        staged.ids, staged.positions, staged.slots, staged.kv_lens, staged.page_table,
        p.temperature, p.top_k, p.top_p, p.min_p_reach, p.seed, p.position,
    ):  # fmt: skip
        tensor.fill_(-77)
    return staged


def state_of(lanes: LaneState) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in vars(lanes).items()}


def check_params_are_the_lanes(staged: StagedRows, row: int, lanes: LaneState, lane: int) -> None:
    p = staged.params
    for got, by_lane in (
        (p.temperature, lanes.temperature), (p.top_k, lanes.top_k), (p.top_p, lanes.top_p),
        (p.min_p_reach, lanes.min_p_reach), (p.seed, lanes.seed),
    ):  # fmt: skip
        assert got[row] == by_lane[lane]


def check_pages_are_the_lanes(staged: StagedRows, sequence: int, lanes: LaneState, lane: int) -> None:
    needed = reference.pages_needed(int(staged.kv_lens[sequence]), PAGE_SIZE)
    assert torch.equal(staged.page_table[sequence, :needed], lanes.page_table[lane, :needed])


def check_updates_begin_lanes_and_enter_pages_once(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for num_joins, num_entries in ((0, 0), (1, 0), (0, 3), (3, 2500), (6, 40)):
        num_lanes, first_join = 6, HEADER_WORDS + 12
        lanes = some_lanes(rng, num_lanes, WIDE_TABLE, device)
        wanted = state_of(lanes)
        joins = [(lane, some_sampling(rng)) for lane in rng.sample(range(num_lanes), num_joins)]
        for lane, sampling in joins:
            wanted["page_table"][lane] = [0] * WIDE_TABLE
            wanted["anchors"][lane] = wanted["positions"][lane] = 0
            wanted["temperature"][lane] = float(np.float32(sampling.temperature))
            wanted["top_p"][lane], wanted["top_k"][lane] = float(np.float32(sampling.top_p)), sampling.top_k
            wanted["min_p_reach"][lane] = float(np.float32(min_p_reach(sampling.min_p)))
            wanted["seed"][lane] = signed(sampling.seed)
        places = rng.sample([(lane, i) for lane in range(num_lanes) for i in range(WIDE_TABLE)], num_entries)
        entries = [(lane, index, rng.randrange(1, 9000)) for lane, index in places]
        for lane, index, page in entries:
            wanted["page_table"][lane][index] = page
        words = np.zeros(first_join + 7 * num_joins + 3 * num_entries, np.int32)
        words[NUM_JOINS], words[NUM_ENTRIES] = num_joins, num_entries
        packed = [join_words(*join) for join in joins] + [np.array(entries, np.int32).ravel()]
        words[first_join:] = np.concatenate(packed)
        control = torch.from_numpy(words).to(device)
        apply_updates(control, first_join, lanes, pdl=pdl)
        assert state_of(lanes) == wanted
        # As if steps had been run since: the second graph of a launch begins nothing anew.
        lanes.positions[:-1] += 3
        wanted["positions"] = lanes.positions.tolist()
        apply_updates(control, first_join, lanes, pdl=pdl)
        assert state_of(lanes) == wanted
