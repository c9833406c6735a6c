"""Random lives of many sessions: after each operation no page is lost, shared or the sentinel."""

from __future__ import annotations

import random

import pytest

from common.handoff.transport import Outcome
from services.drafter.session import SessionKey
from tests.builders_drafter import ManualClock, build_table

PAGE_SIZE = 4
BLOCK_SIZE = 4


@pytest.mark.parametrize("run", range(20))
def test_pages_are_conserved_through_random_operations(run: int) -> None:
    seed = random.randrange(2**32)
    print(f"run {run}, seed {seed}")
    rng = random.Random(seed)
    clock = ManualClock()
    table = build_table(
        num_pages=rng.randint(4, 24), page_size=PAGE_SIZE, num_sessions_max=rng.randint(1, 8),
        context_len_max=40, block_size=BLOCK_SIZE, clock=clock,
    )  # fmt: skip
    # What the table should hold, kept by a model that knows nothing of pages: key to (epoch, slots by
    # position, start).
    owned: dict[SessionKey, tuple[int, dict[int, int]]] = {}
    outcomes = set()
    for _ in range(400):
        key = SessionKey(rng.choice(["x", "y"]), rng.randrange(6))
        epoch = owned[key][0] if key in owned and rng.random() < 0.9 else rng.randrange(4)
        end = table.context_len(key)
        match rng.choice(["open", "append", "append", "append", "block", "close", "time", "instance"]):
            case "open":
                outcome = table.open(key, epoch, rng.choice([0, 0, 5, 41]))
                if outcome is Outcome.OK and (key not in owned or owned[key][0] != epoch):
                    owned[key] = (epoch, {})
            case "append":
                position, count = max(0, end + rng.choice([0, 0, 0, -2, 1])), rng.randint(1, 12)
                outcome, slots = table.append_at(key, epoch, position, count)
                assert (outcome is Outcome.OK) == bool(slots)
                if slots:
                    kept = {p: s for p, s in owned[key][1].items() if p < position}
                    owned[key] = (
                        epoch,
                        kept | dict(zip(range(position, position + count), slots, strict=True)),
                    )
            case "block":
                outcome, session = table.reserve_block(key, epoch, end)
                if session is not None:
                    # A lease that ended in this very call gave its pages to the block.
                    rows = [rows for k, (_, rows) in owned.items() if k in table]
                    taken = {slot for held in rows for slot in held.values()}
                    assert not taken & set(table.block_slots(session))
            case "close":
                outcome = Outcome.OK
                if table.close(key, epoch):
                    del owned[key]
            case "time":
                outcome = Outcome.OK
                clock.now_s += rng.choice([0, 1, 10, 31])
            case "instance":
                outcome = Outcome.OK
                if rng.random() < 0.1:
                    table.drop_other_instances({key.target_instance_id})
        outcomes.add(outcome)
        # Leases end at any moment; the model learns of it here.
        owned = {k: held for k, held in owned.items() if k in table}
        assert table.num_pages_unaccounted == 0
        slots_in_use = [slot for _, rows in owned.values() for slot in rows.values()]
        assert len(slots_in_use) == len(set(slots_in_use)), "two rows share a slot"
        assert all(slot >= PAGE_SIZE for slot in slots_in_use), "a row lies in the sentinel"
        assert {k: table.context_len(k) for k in owned if owned[k][1]} == {
            k: max(rows) + 1 for k, (_, rows) in owned.items() if rows
        }
    assert Outcome.OK in outcomes and len(outcomes) >= 4
    table.close_instance("x")
    table.close_instance("y")
    assert (table.num_sessions, table.num_pages_used, table.usage) == (0, 0, 0)
