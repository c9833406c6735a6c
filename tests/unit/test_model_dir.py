"""What may stand after --model, and what is fetched from a hub: never anything that could be executed."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_dir import resolve_model_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
             "pytorch_model.bin", "modeling_evil.py", "model.pt", "README.md"]  # fmt: skip


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_dir(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("wrong", ["no-such", "./no/such", "/no/such/dir", "a/b/c", "../x", "a b/c", "a/b\n"])
def test_an_unknown_path_is_one_error_with_field_and_value(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        resolve_model_dir(wrong, field="draft")
    assert str(refused.value).startswith("draft: ") and repr(wrong) in str(refused.value)


def test_a_file_and_a_directory_without_configuration_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for wrong in (file, tmp_path):
        with pytest.raises(ConfigError, match="^model: "):
            resolve_model_dir(str(wrong))


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that a snapshot download uses, for one small model."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny"):
            files = [{"type": "file", "path": name, "oid": name, "size": 2} for name in HUB_FILES]
            siblings = [{"rfilename": name} for name in HUB_FILES]
            body = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(files if "/tree/" in path else body).encode(), with_body)
        elif path.startswith("/org/tiny/resolve/"):
            self._send(b"{}", with_body)
        else:
            self.send_error(404)

    def _send(self, body: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0123"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_with_hub(model: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # A process of its own: the hub's client reads its endpoint when it is imported.
    code = "import sys; from common.model_dir import resolve_model_dir; print(resolve_model_dir(sys.argv[1]))"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, "-c", code, model],
        env=kept | settings,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hub_id_fetches_weights_and_text_and_nothing_executable(hub: str, tmp_path: Path) -> None:
    done = resolve_with_hub("org/tiny", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    fetched = sorted(file.name for file in Path(done.stdout.splitlines()[-1]).iterdir())
    assert fetched == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


def test_an_id_that_the_hub_does_not_know_is_one_error(hub: str, tmp_path: Path) -> None:
    done = resolve_with_hub("org/absent", hub, tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("common.errors.ConfigError: model: ") and "'org/absent'" in last
