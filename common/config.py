"""Settings of a service: flags, then environment, then a TOML file, then defaults. No torch, no grpc.

Settings are frozen once loaded; whatever is unknown or out of range is fatal and named.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from common.address import Address, check_loopback, parse_address, parse_listen_address
from common.device_name import check_device_name
from common.errors import ConfigError

# An orchestrator announces each network service by such variables (TANDEM_TARGET_SERVICE_HOST,
# TANDEM_TARGET_PORT_50051_TCP …): they share our prefix by accident and are not settings.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP)\w*)")


def _checked_listen(text: str) -> str:
    parse_listen_address(text, "listen")
    return text


def _checked_loopback(host: str) -> str:
    check_loopback(host, "metrics_host")
    return host


def _checked_peer(text: str) -> str:
    parse_address(text, "drafter")
    return text


def _checked_device(text: str) -> str:
    check_device_name(text)
    return text


# Fields hold the text that a person wrote, already checked, so that flags, environment, file and the
# logged configuration all show one form; the properties give the parsed form.
PeerText = Annotated[str, AfterValidator(_checked_peer)]
# Whether the host has such a device is asked where torch is (common.device).
DeviceText = Annotated[str, AfterValidator(_checked_device)]


class ServiceSettings(BaseSettings):
    """Settings that both services have. A subclass sets env_prefix in its model_config, and EXAMPLE."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    EXAMPLE: ClassVar[str] = ""
    """A command line that works; shown by --help."""

    config: str | None = Field(
        None, description="TOML file with settings, flat, named as the options with _ for -"
    )
    listen: Annotated[str, AfterValidator(_checked_listen)] = Field(
        description="where to serve gRPC: unix:/absolute/path or 127.0.0.1:port"
    )
    metrics_host: Annotated[str, AfterValidator(_checked_loopback)] = Field(
        "127.0.0.1", description="loopback address of the metrics page"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="port of the metrics page; 0 switches it off")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    threads: int = Field(
        0, ge=0, le=1024,
        description="CPU threads for tensor work, ignored with --device cuda; 0 leaves it to the library",
    )  # fmt: skip
    grace_s: float = Field(
        20.0, ge=0, le=3600, allow_inf_nan=False, description="seconds for running work to end after SIGTERM"
    )
    device: DeviceText = Field("cpu", description="where tensors live: cpu, cuda or cuda:N")

    @property
    def listen_address(self) -> Address:
        """`listen`, parsed."""
        return parse_listen_address(self.listen, "listen")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """The environment above keyword arguments, which is how `load_settings` passes the file's values.

        No .env file: what a service does would depend on the folder it was started in.
        """
        return env_settings, init_settings


Settings = TypeVar("Settings", bound=ServiceSettings)


def load_settings(settings_cls: type[Settings], prog: str, argv: Sequence[str] | None = None) -> Settings:
    """The settings of a service from its command line (default: of this process), environment and file.

    Raises ConfigError naming the first wrong field, its limit and its value. `--help` prints and exits.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prefix = settings_cls.model_config.get("env_prefix", "")
    _refuse_unknown_environment(settings_cls, prefix)
    parser = _Parser(
        prog=f"python -m {prog}",
        description=settings_cls.__doc__,
        epilog=f"example:\n  {settings_cls.EXAMPLE}\n\nEach option is also read from the environment: "
        f"--log-level is {prefix}LOG_LEVEL. Options win over the environment, that over --config.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags: CliSettingsSource[Any] = CliSettingsSource(
        settings_cls, root_parser=parser, cli_parse_args=arguments
    )
    path = flags().get("config") or os.environ.get(f"{prefix}CONFIG")
    try:
        file: dict[str, Any] = _read_toml(str(path)) if path else {}
        return settings_cls(**file, _cli_settings_source=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        raise _first_problem(error, prefix) from None


def load_settings_or_exit(settings_cls: type[Settings], prog: str) -> Settings:
    """`load_settings` for a `__main__`: a wrong setting is one line on stderr and exit status 2."""
    try:
        return load_settings(settings_cls, prog)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        problem, _, given = message.partition(": ")
        raise ConfigError("command line", f"{problem} (see --help)", given=given)


def _refuse_unknown_environment(settings_cls: type[ServiceSettings], prefix: str) -> None:
    for name in os.environ:
        key = name.removeprefix(prefix)
        if not prefix or key == name or _SERVICE_LINK.fullmatch(key):
            continue
        if key.lower() not in settings_cls.model_fields:
            # Its value may be a secret that was meant for something else.
            raise ConfigError("environment", "must hold settings only (see --help)", given=name)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"must be a readable file ({error.strerror})", given=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"must be TOML ({error})", given=path) from None


def _first_problem(error: ValidationError, prefix: str) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        flag = "--" + name.replace("_", "-")
        return ConfigError(name, f"is required: give {flag} or {prefix}{name.upper()}", given=None)
    if problem["type"] == "extra_forbidden":
        return ConfigError(name, "is no setting (see --help)", given=problem["input"])
    message = problem["msg"].replace("Input should be", "must be").replace("String should", "must")
    return ConfigError(name, message, given=problem["input"])
