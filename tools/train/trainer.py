"""The training loop's one step: capture, draft, loss, gradient, update; and the measure on held-out text.

Everything random follows from (seed, step), so a run that goes on from a checkpoint is the run that never
stopped. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from common.layers.rope import RopeTable, build_rope_table
from services.drafter.model.dflash import DFlashConfig
from tools.train.acceptance import Acceptance, measure_acceptance
from tools.train.blocks import Blocks, anchor_candidates, attention_bias, build_blocks, draw_anchors
from tools.train.corpus import Corpus
from tools.train.dense_target import DenseTarget
from tools.train.draft_forward import draft_hidden
from tools.train.draft_weights import map_weights, named_weights, new_weights
from tools.train.generate import ANSWER
from tools.train.head_loss import BlockLoss, Weighting
from tools.train.replay import Replayed, TensorFunction


@dataclass(frozen=True)
class TrainingSettings:
    """One run. batch_rows sequences a step, num_anchors blocks in each."""

    num_steps: int = 20000
    batch_rows: int = 16
    num_anchors: int = 128
    learning_rate: float = 6e-4
    warm_up_share: float = 0.04
    gradient_norm_max: float = 1.0
    weighting: Weighting = Weighting.DECAY
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        warm_up = max(1, round(self.num_steps * self.warm_up_share))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.num_steps - warm_up)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class Trainer:
    """A draft in training: fp32 master weights, computed with in the target's type."""

    def __init__(
        self,
        target: DenseTarget,
        config: DFlashConfig,
        rope_json: dict[str, object],
        settings: TrainingSettings,
        corpus: Corpus,
        *,
        fused: bool = False,
    ) -> None:
        """rope_json: the draft's config.json, for its rotary base. corpus: on the target's device."""
        if len(corpus) < settings.batch_rows:
            raise ConfigError(
                "batch_rows", f"must be at most the corpus's {len(corpus)}", given=settings.batch_rows
            )
        self.settings = settings
        self.step = 0
        self._target, self._config, self._corpus = target, config, corpus
        table = build_rope_table(config.head_dim, config.max_len + config.block_size, rope_json)
        self._rope = RopeTable(table.cos.to(target.device), table.sin.to(target.device))
        initial = new_weights(config, torch.Generator().manual_seed(settings.seed))
        self.weights = map_weights(initial, lambda t: t.to(target.device).requires_grad_())
        self._parameters = list(named_weights(self.weights).values())
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=0.0, fused=target.device.type == "cuda"
        )
        self._loss = BlockLoss(target.lm_head, config.block_size, settings.weighting, fused=fused)
        self._draft: Callable[..., torch.Tensor]
        self._draft = torch.compile(draft_hidden, dynamic=False) if fused else draft_hidden
        # 16 ms of GPU work a step took the host 28 ms to launch.
        self._gradients: TensorFunction
        self._gradients = Replayed(self._compute_gradients) if fused else self._compute_gradients
        self._epoch = -1
        self._batches: list[tuple[torch.Tensor, int]] = []

    def train_step(self) -> torch.Tensor:
        """One update; returns the loss, still on the device (and overwritten by the next step)."""
        batch = self._next_batch()
        generator = torch.Generator(self._target.device)
        generator.manual_seed(self.settings.seed * 1_000_003 + self.step)
        anchors, real = draw_anchors(batch, self.settings.num_anchors, generator)
        loss, *gradients = self._gradients(*vars(batch).values(), anchors, real)
        for weight, gradient in zip(self._parameters, gradients, strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.gradient_norm_max)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step)
        self.optimizer.step()
        self.step += 1
        return loss

    def _compute_gradients(
        self, tokens: torch.Tensor, roles: torch.Tensor, lengths: torch.Tensor, temperature: torch.Tensor,
        anchors: torch.Tensor, real: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Loss of a batch's blocks, and its gradient for each weight in the order of their names."""
        batch = Corpus(tokens, roles, lengths, temperature)
        blocks = self._blocks(batch, anchors, real)
        hidden = self._block_rows(self._capture(batch), blocks)
        result = self._loss(hidden.detach(), blocks.labels.flatten(0, 1), blocks.learned.flatten(0, 1))
        return result.loss, *torch.autograd.grad(hidden, self._parameters, result.grad_hidden)

    @torch.no_grad()
    def measure(self, held_out: Corpus) -> Acceptance:
        """Accept length on texts (on the device): a block at every anchor there is."""
        num_anchors = self.settings.num_anchors
        hits, served = [], []
        for rows in torch.arange(len(held_out), device=self._target.device).split(self.settings.batch_rows):
            # A last smaller batch is filled with its own first row: one shape to compile.
            filled = torch.cat([rows, rows[:1].expand(self.settings.batch_rows - len(rows))])
            batch = held_out.take(filled)
            length = batch.tokens.shape[1]
            captured, row_candidates = self._capture(batch), anchor_candidates(batch)
            row_hits = []
            for start in range(0, length, num_anchors):
                anchors = torch.arange(start, start + num_anchors, device=self._target.device).clamp(
                    max=length - 1
                )
                anchors = anchors.expand(len(filled), -1)
                blocks = self._blocks(batch, anchors, row_candidates.gather(1, anchors))
                result = self._loss(
                    self._block_rows(captured, blocks),
                    blocks.labels.flatten(0, 1),
                    blocks.learned.flatten(0, 1),
                )
                row_hits.append(result.hits.view_as(blocks.labels) & blocks.learned)
            hits.append(torch.cat(row_hits, dim=1)[: len(rows), :length])
            # Serving's first anchor is the answer's first token: prefill has given it.
            served.append((row_candidates & (batch.roles == ANSWER))[: len(rows)])
        return measure_acceptance(torch.cat(hits), torch.cat(served))

    def _blocks(self, batch: Corpus, anchors: torch.Tensor, real: torch.Tensor) -> Blocks:
        return build_blocks(batch, anchors, real, self._config.block_size, self._config.mask_token_id)

    def _capture(self, batch: Corpus) -> torch.Tensor:
        return self._target.capture(batch.tokens.long(), self._config.captured_layer_ids)

    def _block_rows(self, captured: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Hidden rows 1…K of all blocks: `[b * A, K, H]`, contiguous (strided ones made the lm_head's
        product six times slower)."""
        target, c = self._target, self._config
        bias = attention_bias(blocks.anchors, captured.shape[1], c.block_size, target.dtype)
        weights = map_weights(self.weights, lambda t: t.to(target.dtype))
        hidden = self._draft(
            weights, c, captured, blocks.ids, blocks.positions, bias, target.embedding, self._rope
        )
        return hidden[:, :, 1:].flatten(0, 1).contiguous()

    def _next_batch(self) -> Corpus:
        per_epoch = len(self._batches) or len(
            self._corpus.epoch(self.settings.seed, 0, self.settings.batch_rows)
        )
        epoch, index = divmod(self.step, per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = self._corpus.epoch(self.settings.seed, epoch, self.settings.batch_rows)
        rows, length = self._batches[index]
        return self._corpus.take(rows.to(self._corpus.tokens.device), length)
