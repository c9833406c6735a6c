"""What is asked: ids without meaning for random weights, conversations for a model that was trained.

Acceptance of a trained draft means something only where the target has something to say. Knows token ids and
tokenizers, no torch.
"""

from __future__ import annotations

import random
from typing import Protocol

from common.errors import ConfigError
from tools.chat import ChatTokenizer
from tools.sample_prompts import SAMPLE_PROMPTS
from tools.train.openers import draw_opener

_DRAWS_MAX = 100


class Prompts(Protocol):
    """Where prompts come from; none is longer than it was told."""

    def measured(self, rng: random.Random, number: int) -> list[int]:
        """For rows: prompts that no draft was trained on, all of about one length."""

    def varied(self, rng: random.Random) -> list[int]:
        """For comparisons and soaks: of any length, rarely the same twice."""


class RandomPrompts:
    """Ids of the vocabulary. What they cost does not depend on what they are."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._vocab_size, self._num_tokens = vocab_size, num_tokens

    def measured(self, rng: random.Random, number: int) -> list[int]:
        return rng.choices(range(self._vocab_size), k=self._num_tokens)

    def varied(self, rng: random.Random) -> list[int]:
        return rng.choices(range(self._vocab_size), k=rng.randint(1, self._num_tokens))


class ChatPrompts:
    """A user's turn in the model's own chat template."""

    def __init__(self, tokenizer: ChatTokenizer, num_tokens_max: int) -> None:
        """ConfigError when the sample prompts are longer than num_tokens_max."""
        self._tokenizer, self._num_tokens_max = tokenizer, num_tokens_max
        self._samples = [self._encode(text) for text in SAMPLE_PROMPTS]
        longest = max(map(len, self._samples))
        if longest > num_tokens_max:
            limit = f"must be at least {longest} for this model"
            raise ConfigError("prompt_tokens", limit, given=num_tokens_max)

    def measured(self, rng: random.Random, number: int) -> list[int]:
        """The sample prompts in turn."""
        return self._samples[number % len(self._samples)]

    def varied(self, rng: random.Random) -> list[int]:
        """Openers of the training set: many, and of different lengths."""
        for _ in range(_DRAWS_MAX):
            prompt = self._encode(draw_opener(rng))
            if len(prompt) <= self._num_tokens_max:
                return prompt
        raise ConfigError("prompt_tokens", "must fit a short question", given=self._num_tokens_max)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])
