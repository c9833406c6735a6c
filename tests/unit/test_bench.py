"""What the bench computes from what it measured."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.builders import build_tiny_llama_dir
from tools.bench_result import Row, as_json, run_rounds, same_tokens
from tools.bench_rows import INLINE, PLAIN
from tools.closed_loop import at_once, common_window
from tools.memory_floor import step_floor_bytes, weight_bytes
from tools.scrape import mean_ms, scrape
from tools.target_client import ReceivedDelta


def _deltas(*times_and_widths: tuple[float, int]) -> list[ReceivedDelta]:
    return [ReceivedDelta([0] * width, [False] * width, at_s) for at_s, width in times_and_widths]


def test_only_the_time_in_which_all_requests_decode_counts() -> None:
    a = _deltas((0.0, 1), (1.0, 2), (2.0, 2), (3.0, 2))
    b = _deltas((0.5, 1), (1.5, 4), (2.5, 4), (3.5, 4))
    window = common_window([a, b])
    assert (window.start_s, window.stop_s) == (0.5, 3.0)
    assert window.num_tokens == 2 + 4 + 2 + 4 + 2
    assert window.tok_s == pytest.approx(14 / 2.5)


def test_the_first_message_of_a_lone_request_is_prefill_and_not_counted() -> None:
    assert common_window([_deltas((1.0, 3), (2.0, 1), (3.0, 1))]).tok_s == pytest.approx(1.0)


def test_requests_that_never_met_give_no_rate() -> None:
    assert common_window([_deltas((0.0, 1), (1.0, 1)), _deltas((2.0, 1), (3.0, 1))]).tok_s == 0


def test_calls_run_at_once_and_answer_in_order() -> None:
    meet = threading.Barrier(5, timeout=5)
    assert at_once([lambda i=i: (meet.wait(), i)[1] for i in range(5)]) == list(range(5))


def test_every_row_runs_once_a_round_in_alternating_order() -> None:
    rows, order = [Row(PLAIN, 1), Row(INLINE, 1)], []
    run_rounds(rows, 3, lambda row, turn: order.append((turn, row.mode)), lambda row: None)
    assert order == [(0, PLAIN), (0, INLINE), (1, INLINE), (1, PLAIN), (2, PLAIN), (2, INLINE)]


def test_the_json_holds_medians_and_the_promised_keys_of_measured_rows() -> None:
    row = Row(INLINE, 2, tok_s=[10.0, 30.0, 20.0], step_ms=[50.0, 40.0, 60.0])
    row.phases_ms = [{"verify": 1.0}, {"verify": 3.0, "prefill": 9.0}, {"verify": 2.0}]
    row.accept_length = [2.0, 2.5, 3.0]
    row.more = {"host_ms": [0.4, 0.2, 0.3]}
    result = as_json(
        [row, Row(PLAIN, 2)],
        device="cpu",
        model_name="tiny",
        block_size=8,
        accept_kind="real",
        floors_ms={INLINE: 25.0},
    )
    assert set(result) == {"date", "commit", "device", "model", "block_size", "accept", "rows"}
    assert result["accept"] == {"kind": "real", "length": 2.5}
    assert json.loads(json.dumps(result))["rows"] == [
        {
            "mode": "inline", "concurrency": 2, "tok_s": 20.0, "step_ms": 50.0,
            "phases_ms": {"prefill": 9.0, "verify": 2.0}, "floor_fraction": 0.5, "accept_length": 2.5,
            "host_ms": 0.3,
        }
    ]  # fmt: skip


def test_tokens_are_the_same_only_if_every_run_of_a_prompt_agrees() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokens = [rng.randrange(100) for _ in range(20)]
    plain = Row(PLAIN, 1, token_ids={0: [tokens, list(tokens)], 1: [[1, 2]]})
    drafted = Row(INLINE, 1, token_ids={0: [list(tokens)]})
    assert same_tokens([plain, drafted])
    tokens[rng.randrange(20)] += 1
    assert not same_tokens([plain, drafted])


def test_the_floor_reads_a_tied_head_once_and_leaves_an_untied_embedding_out(tmp_path: Path) -> None:
    for tied in (True, False):
        directory = build_tiny_llama_dir(tmp_path / str(tied), tied=tied)
        sizes = weight_bytes(directory)
        embedding = 192 * 48 * 4
        assert step_floor_bytes(directory, None) == sum(sizes.values()) - (0 if tied else embedding)
        draft = tmp_path / f"draft-{tied}"
        draft.mkdir()
        save_file({"fc.weight": torch.zeros(10, 20, dtype=torch.bfloat16)}, draft / "model.safetensors")
        extra = step_floor_bytes(directory, draft) - step_floor_bytes(directory, None)
        assert extra == 10 * 20 * 4 + embedding


@pytest.fixture
def page() -> Iterator[tuple[str, list[str]]]:
    """A metrics page: its address and a list whose only element is its text."""
    text = [""]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text[0].encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", text
    server.shutdown()
    thread.join()
    server.server_close()


def test_phases_are_means_of_what_happened_between_two_readings(page: tuple[str, list[str]]) -> None:
    url, text = page
    line = 'x_seconds_{}{{model_name="m",phase="{}"}} {}\n'

    def show(verify: tuple[int, float], prefill: tuple[int, float]) -> None:
        text[0] = "# TYPE x_seconds histogram\n" + "".join(
            line.format(part, phase, value)
            for phase, of_phase in (("verify", verify), ("prefill", prefill))
            for part, value in zip(("count", "sum"), of_phase, strict=True)
        )

    show((10, 5.0), (1, 1.0))
    before = scrape(url)
    show((14, 5.5), (1, 1.0))
    assert mean_ms(before, scrape(url), "x_seconds", "phase") == {"verify": pytest.approx(125.0)}
    assert before.value("x_seconds_count", phase="verify") == 10
