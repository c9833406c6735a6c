"""transformers' own `generate` as a peer of the bench: same checkpoint, fp32, greedy, in this process.

The only module of the product that imports transformers, and only when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from tools.target_client import ReceivedDelta


class TransformersPeer:
    """A loaded model. One request at a time, as a script that calls `generate` would run it."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        """threads: of torch in this process; 0 leaves the library's choice, as the services do."""
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise ConfigError("peer", "needs the extra `tandem[peer]`", given="transformers") from None
        logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, trust_remote_code=False
        )
        self._model.eval()
        # As with ignore_eos: an end that only one side sees would compare different work.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[ReceivedDelta]:
        """Generate greedily; one delta a token."""
        clock = _Clock()
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=clock,
            )
        return clock.deltas


class _Clock:
    """A streamer (transformers calls put and end) that keeps the time of each token."""

    def __init__(self) -> None:
        self.deltas: list[ReceivedDelta] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # the first call carries the prompt
            self._prompt_seen = True
            return
        ids = value.flatten().tolist()
        self.deltas.append(ReceivedDelta(ids, [False] * len(ids), time.perf_counter()))

    def end(self) -> None: ...
