"""Settings: where values come from, and that each wrong one is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from common import limits
from common.address import TcpAddress, UnixAddress
from common.config import load_settings, load_settings_or_exit
from common.errors import ConfigError
from services.target.config import TargetSettings
from services.target.kv_budget import kv_tokens_that_fit

NEEDED = ["--model", "m", "--listen", "unix:/run/t.sock"]


def load(*flags: str) -> TargetSettings:
    return load_settings(TargetSettings, "services.target", [*NEEDED, *flags])


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "target.toml"
    file.write_text("threads = 1\ngrace_s = 1.5\npage_size = 8\n")
    monkeypatch.setenv("TANDEM_TARGET_GRACE_S", "2.5")
    monkeypatch.setenv("TANDEM_TARGET_PAGE_SIZE", "32")
    settings = load("--config", str(file), "--page-size", "64")
    assert (settings.threads, settings.grace_s, settings.page_size) == (1, 2.5, 64)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "target.toml"
    file.write_text("threads = 3\n")
    monkeypatch.setenv("TANDEM_TARGET_CONFIG", str(file))
    assert load().threads == 3


def test_addresses_are_parsed() -> None:
    settings = load("--drafter", "localhost:50052")
    assert settings.listen_address == UnixAddress("/run/t.sock")
    assert settings.drafter_address == TcpAddress("localhost", 50052)


def test_settings_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        load().threads = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "field", "limit", "given"),
    [
        (["--metrics-port", "65536"], "metrics_port", "65535", "65536"),
        (["--metrics-port", "-1"], "metrics_port", "0", "-1"),
        (["--metrics-host", "0.0.0.0"], "metrics_host", "loopback", "0.0.0.0"),
        (["--threads", "many"], "threads", "integer", "many"),
        (["--grace-s", "nan"], "grace_s", "finite", "nan"),
        (["--grace-s", "1e9"], "grace_s", "3600", "1e9"),
        (["--log-level", "loud"], "log_level", "'debug', 'info', 'warning' or 'error'", "loud"),
        (["--device", "gpu"], "device", "cpu, cuda or cuda:N", "gpu"),
        (["--device", "cuda:-1"], "device", "cpu, cuda or cuda:N", "cuda:-1"),
        (["--dtype", "int8"], "dtype", "'float32' or 'bfloat16'", "int8"),
        (["--dtype", "float32", "--device", "cuda"], "dtype", "bfloat16 with --device cuda", "float32"),
        (["--handoff", "shared"], "handoff", "'auto', 'inline' or 'device'", "shared"),
        (["--handoff", "device", "--drafter", "unix:/d"], "handoff", "inline with --device cpu", "device"),
        (["--handoff", "device", "--device", "cuda"], "handoff", "inline without --drafter", "device"),
        (["--row-independent"], "row_independent", "off with --device cpu", "True"),
        (["--draft-deadline-s", "0"], "draft_deadline_s", "greater than 0", "0"),
        (["--num-running-max", "257"], "num_running_max", "256", "257"),
        (["--num-waiting-max", "100000"], "num_waiting_max", "512", "100000"),
        (["--kv-tokens", "0"], "kv_tokens", "2", "0"),
        (["--max-len", "99999999"], "max_len", "1048576", "99999999"),
        (["--served-model-name", ""], "served_model_name", "must have at least 1 character", "''"),
        (["--drafter", "somewhere"], "drafter", "unix:/absolute/path or host:port", "somewhere"),
        (["--no-such-flag", "7"], "command line", "--help", "--no-such-flag 7"),
        (["--thread", "7"], "command line", "--help", "--thread 7"),
        (["--config", "/does/not/exist"], "config", "readable file", "/does/not/exist"),
    ],
)
def test_a_wrong_value_is_named_with_field_limit_and_value(
    flags: list[str], field: str, limit: str, given: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    text = str(caught.value)
    assert text.startswith(f"{field}: ")
    assert limit in text
    assert given in text
    assert "\n" not in text


def test_what_is_required_is_named_with_both_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"listen: .*--listen or TANDEM_TARGET_LISTEN"):
        load_settings(TargetSettings, "services.target", ["--model", "m"])


@pytest.mark.parametrize(
    ("text", "problem"), [("no_such_key = 1", "no_such_key"), ("threads = ", "config"), ("\xff", "config")]
)
def test_a_wrong_file_is_fatal(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "target.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^{problem}: "):
        load("--config", str(file))


def test_an_unknown_variable_of_our_prefix_is_fatal_and_its_value_stays_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_TARGET_THREDS", "hunter2")
    with pytest.raises(ConfigError, match="TANDEM_TARGET_THREDS") as caught:
        load()
    assert "hunter2" not in str(caught.value)


def test_variables_by_which_an_orchestrator_announces_services_are_no_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP_ADDR"):
        monkeypatch.setenv(f"TANDEM_TARGET_{name}", "tcp://10.0.0.1:50051")
    assert load().listen == "unix:/run/t.sock"


def test_a_wrong_setting_ends_a_service_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    argv, sys.argv = sys.argv, ["services.target", *NEEDED, "--threads", "-3"]
    try:
        with pytest.raises(SystemExit) as caught:
            load_settings_or_exit(TargetSettings, "services.target")
    finally:
        sys.argv = argv
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: threads: must be greater than or equal to 0, got '-3'"
    ]


def test_help_describes_every_setting_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(TargetSettings, "services.target", ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in TargetSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description, f"{name} has no description"
    assert TargetSettings.EXAMPLE in text


def test_fronts_are_processes_of_their_own_where_the_device_is_no_cpu() -> None:
    assert load().num_fronts == 0
    assert load("--device", "cuda:1").num_fronts == 1
    assert load("--device", "cuda", "--fronts", "0").num_fronts == 0
    assert load("--listen", "127.0.0.1:0", "--fronts", "3").num_fronts == 3
    assert load("--fronts", "1").num_fronts == 1


def test_a_step_takes_more_prompt_rows_on_a_gpu_unless_it_is_told_how_many() -> None:
    assert load().num_extend_rows_max == 256
    assert load("--device", "cuda").num_extend_rows_max == 2048
    assert load("--device", "cuda", "--extend-rows-max", "7").num_extend_rows_max == 7


def test_who_chooses_the_size_of_the_kv_pool_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("--device", "cuda").kv_tokens is None
    assert load("--kv-tokens", "4096").kv_tokens == 4096
    with pytest.raises(SystemExit):
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "default: 16384 on a cpu, else what fits in 0.85 of the memory" in text
    assert "default: 256 on a cpu, else 2048" in text
    assert "CPU threads for tensor work, ignored with --device cuda" in text


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "other", "token_bytes", "useful", "tokens"),
    [
        # 8B in bfloat16 on a GPU of 140 GB: 144 KiB a token.
        (124 * GIB, 4 * GIB, 144 << 10, 1 << 30, 742_736),
        # A small model: what 32 requests of 8,192 tokens can hold.
        (140 * GIB, 2 * GIB, 23 << 10, 32 * 8192, 32 * 8192),
        (140 * GIB, 0, 1, 1 << 40, limits.KV_TOKENS_MAX),
        (GIB + 16 * 1024, GIB, 850, 1 << 30, 16),
    ],
)
def test_the_kv_pool_takes_what_is_left_over_but_no_more_than_is_of_use(
    free: int, other: int, token_bytes: int, useful: int, tokens: int
) -> None:
    found = kv_tokens_that_fit(
        free_bytes=free, other_bytes=other, token_bytes=token_bytes, page_size=16, tokens_useful=useful
    )
    assert found == tokens
    assert found % 16 == 0 and found * token_bytes <= 0.85 * (free - other)


@pytest.mark.parametrize("free", [0, GIB, GIB + 16 * 1024])
def test_a_gpu_that_has_nothing_left_for_a_page_is_said_to_be_full(free: int) -> None:
    with pytest.raises(ConfigError, match=rf"^kv_tokens: cannot be chosen, since {free >> 20} MiB are free"):
        kv_tokens_that_fit(
            free_bytes=free, other_bytes=GIB, token_bytes=1024, page_size=16, tokens_useful=1 << 20
        )


def test_a_unix_socket_is_not_shared_by_fronts() -> None:
    with pytest.raises(ConfigError, match="^fronts: must be at most 1 on a unix socket, .* got 2$"):
        load("--fronts", "2")


def test_the_element_type_follows_the_device_unless_it_is_given() -> None:
    assert load().dtype_name == "float32"
    assert load("--dtype", "bfloat16").dtype_name == "bfloat16"
    assert load("--device", "cuda").dtype_name == "bfloat16"


def test_the_hand_offs_socket_lies_beside_the_drafters_unless_a_directory_is_given() -> None:
    assert load("--drafter", "unix:/run/tandem/d.sock").handoff_parent == Path("/run/tandem")
    assert load("--drafter", "localhost:50052").handoff_parent == Path(tempfile.gettempdir())
    given = load("--drafter", "unix:/run/tandem/d.sock", "--handoff-dir", "/run/ring")
    assert given.handoff_parent == Path("/run/ring")


def test_what_is_logged_are_the_settings_as_they_hold() -> None:
    logged = load("--device", "cuda").effective()
    assert (logged["dtype"], logged["extend_rows_max"], logged["fronts"]) == ("bfloat16", 2048, 1)
    assert load().effective()["dtype"] == "float32"
