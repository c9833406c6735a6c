"""`tandem convert`: a GGUF file becomes a model directory of safetensors and JSON.

Composition only: which file, where to, all or nothing. Weights that were quantized stay rounded; they are
written as float32 and the result says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file

from common.errors import CheckpointError, ConfigError
from tools.gguf_llama import GgufLlama
from tools.gguf_tokenizer import build_tokenizer, tokenizer_config
from tools.model_package import locate_packaged_file

app = typer.Typer(add_completion=False)

# Rises when the same file would be converted differently, so that older output is made anew.
CONVERSION_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
OUTPUT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                WEIGHTS_FILE, "README.md")  # fmt: skip

_README = """\
# {name}

Converted by `tandem convert` from `{file}` (sha256 `{sha256}`).

These are **dequantized {quantization} weights**: they were rounded when the GGUF file was made, and are
written as float32 without further loss. They are not the weights that the model's authors published.

License of the weights, as the file states it: {license}.
"""


@app.command()
def convert(
    out: Annotated[Path, typer.Option(help="Directory to make, or an earlier conversion to renew.")],
    gguf: Annotated[Path | None, typer.Argument(help="A GGUF file of a Llama-family model.")] = None,
    package: Annotated[str | None, typer.Option(help="Take the file from this installed package.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Refuse the file unless it has this checksum.")] = None,
) -> None:
    """Turn a GGUF file into a safetensors model directory (float32, dequantized)."""
    if (gguf is None) == (package is None):
        raise ConfigError("gguf", "give either a GGUF file or --package", given=str(gguf))
    if package is not None:
        gguf, sha256 = locate_packaged_file(package)
    assert gguf is not None
    console = Console(stderr=True)
    if convert_gguf(gguf, out, expected_sha256=sha256, console=console):
        console.print(f"wrote {out}", highlight=False)
    else:
        console.print(f"{out} is complete already", highlight=False)


def convert_gguf(gguf: Path, out: Path, *, expected_sha256: str | None, console: Console) -> bool:
    """Convert `gguf` into the directory `out`, which appears whole or not at all.

    Returns False when `out` already is this conversion of this file. Raises ConfigError for a path
    that cannot be used and CheckpointError for a file that is damaged or of another kind.
    """
    if not gguf.is_file():
        raise ConfigError("gguf", "must be a file", given=str(gguf))
    sha256 = _sha256(gguf)
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise CheckpointError("sha256", f"of {gguf.name} must be {expected_sha256}", given=sha256)
    source = {"file": gguf.name, "sha256": sha256, "conversion": CONVERSION_VERSION}
    if out.exists():
        found = _source_of(out)
        if found is None:
            raise ConfigError("out", "must not exist, or be an earlier conversion", given=str(out))
        if source.items() <= found.items() and all((out / name).is_file() for name in OUTPUT_FILES):
            return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        staging = Path(scratch) / "new"
        staging.mkdir()
        _write(GgufLlama(gguf), staging, source, console)
        if out.exists():
            os.replace(out, Path(scratch) / "old")
        os.replace(staging, out)
    return True


def _write(model: GgufLlama, directory: Path, source: dict[str, Any], console: Console) -> None:
    note = f"{model.quantization} weights, dequantized to float32"
    config = model.config() | {"tandem_source": source | {"weights": note}}
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model))
    build_tokenizer(model).save(str(directory / "tokenizer.json"))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("dequantizing", total=model.num_tensors + 1)
        tensors = {}
        for name, weights in model.tensors():
            tensors[name] = weights
            progress.advance(task)
        progress.update(task, description="writing")
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        # The writer makes it private to its user; a service may run as another.
        (directory / WEIGHTS_FILE).chmod(0o644)
    readme = _README.format(
        name=model.field("general.name", source["file"]),
        quantization=model.quantization,
        license=model.field("general.license", "not stated"),
        **source,
    )
    (directory / "README.md").write_text(readme, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _source_of(directory: Path) -> dict[str, Any] | None:
    """What a directory was converted from; None when it is no conversion of ours."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))["tandem_source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
