"""From what a person writes after `--model` to a local directory with a checkpoint.

Fetches weights, JSON and the chat template's text only: nothing that a checkpoint could have us execute.
Must not look inside the files; their readers judge them.
"""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import ConfigError

# organisation/name, as the hub allows it; anything else is meant as a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# No *.bin or *.pt (pickles) and no *.py. The template is text that is rendered in a sandbox.
FETCHED_FILES = ("*.safetensors", "*.json", "chat_template.jinja")


def resolve_model_dir(model: str, *, field: str = "model") -> Path:
    """The local directory of a checkpoint given as a directory or as a Hugging Face id `org/name`.

    A hub id is downloaded into the hub's own cache, or taken from there. `field` names the setting in
    errors. Raises ConfigError when there is neither such a directory nor such a model.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _checked(directory, field, model)
    if directory.exists() or not _HUB_ID.fullmatch(model):
        raise ConfigError(field, "must be a model directory or a Hugging Face id org/name", given=model)
    return _checked(_fetch(model, field), field, model)


def _checked(directory: Path, field: str, model: str) -> Path:
    if not (directory / "config.json").is_file():
        raise ConfigError(field, "must be a directory with a config.json", given=model)
    return directory


def _fetch(model: str, field: str) -> Path:
    # Imported here: a third of a second that a local directory need not pay.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED_FILES)))
    # The hub's errors, its HTTP client's and the file system's share no base below Exception, and each
    # means the same here; the cause stays attached.
    except Exception as error:
        problem = f"is no local directory, and fetching it from the hub failed ({type(error).__name__})"
        raise ConfigError(field, problem, given=model) from error
