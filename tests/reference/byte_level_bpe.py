"""Byte-level BPE with digits apart, as slow and plain as it can be written: the tokenizer tests' reference.

Written from the description of GPT-2's byte-level BPE; shares no code with `tokenizers`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import regex

from tests.builders_gguf import byte_symbols

_WORDS = regex.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


class ByteLevelBpe:
    """Encodes text without special tokens."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._symbols = byte_symbols()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids = []
        for piece in _digits_apart(text):
            for word in _WORDS.findall(piece):
                ids += [self._ids[symbol] for symbol in self._merge(word)]
        return ids

    def _merge(self, word: str) -> list[str]:
        symbols = [self._symbols[byte] for byte in word.encode("utf-8")]
        while True:
            ranked = [
                (self._ranks[pair], i)
                for i, pair in enumerate(zip(symbols, symbols[1:], strict=False))
                if pair in self._ranks
            ]
            if not ranked:
                return symbols
            _, first = min(ranked)
            symbols[first : first + 2] = [symbols[first] + symbols[first + 1]]


def _digits_apart(text: str) -> list[str]:
    pieces = [""]
    for char in text:
        if unicodedata.category(char) in ("Nd", "Nl", "No"):
            pieces += [char, ""]
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece]
