"""Text to tokens and back for the tools: a checkpoint's tokenizer, its chat template, streamed text.

Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. The template is the checkpoint's,
so it runs in a sandbox that can neither reach attributes nor change its arguments. Must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.errors import CheckpointError

# What a decoder puts in place of bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"


class ChatTokenizer:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, model_dir: Path) -> None:
        """Load both. Raises CheckpointError for a missing or damaged tokenizer or template."""
        try:
            self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a missing and for a bad file
            raise CheckpointError("tokenizer.json", "must be readable", given=str(error)) from error
        config = _read_json(model_dir / "tokenizer_config.json")
        self._special = {
            role: token["content"] if isinstance(token, dict) else token
            for role, token in config.items()
            if role in ("bos_token", "eos_token", "unk_token", "pad_token") and token is not None
        }
        self._template = _load_template(model_dir, config)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer knows, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands: nothing is put before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next turn begins.

        messages: mappings with "role" and "content". A control token spelled out in a message becomes
        that control token: whoever writes the messages is trusted with that.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to where the assistant's next turn begins.

        Raises CheckpointError when there is no template or it cannot render these messages.
        """
        if self._template is None:
            raise CheckpointError("chat_template", "is needed for a conversation", given=None)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise CheckpointError("chat_template", "cannot render this", given=str(error)) from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)


class TextStream:
    """The text of a growing token sequence, piece by piece; all pieces together equal `decode` of all ids.

    A character whose bytes are spread over tokens is held back until its last one. The ids kept are
    those held back and those of the piece before (some decoders treat the first token unlike others):

        [ piece before | held back ]
        0              _shown      len(_ids)
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids; returns the text that is certain now, perhaps empty."""
        self._ids.extend(ids)
        text = self._unshown()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text

    def finish(self) -> str:
        """The text of what is still held back, now that no more ids come."""
        text = self._unshown()
        self._ids, self._shown = [], 0
        return text

    def _unshown(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(before) :]


def _load_template(model_dir: Path, config: dict[str, Any]) -> Template | None:
    beside = model_dir / "chat_template.jinja"
    source = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("chat_template", "must be one template", given=type(source).__name__)
    # Published templates are written for these settings, use break and call raise_exception.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError("chat_template", "must be a Jinja template", given=str(error)) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path.name, "must be readable JSON", given=type(error).__name__) from error
    if not isinstance(value, dict):
        raise CheckpointError(path.name, "must be a JSON object", given=type(value).__name__)
    return value
