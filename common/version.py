"""Which Tandem this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tandem_version() -> str:
    """Version of the installed distribution; `unknown` in a checkout that was never installed."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "unknown"
