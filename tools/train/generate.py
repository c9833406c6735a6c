"""Text written by the target: many rows in lock-step, each following its own script of forced tokens.

All rows stand at the same position, so a step is one dense decode and, on CUDA, one graph replay with no
word from the host. A row never idles: when an answer ends, its script opens the next user turn. Knows
token ids and roles; nothing of templates, files or training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tools.train.dense_target import DenseTarget

# Roles of tokens: where each came from. Only an ANSWER is learned.
FORCED, USER, ANSWER = 0, 1, 2

# Keys that a step attends to are rounded up to this, one graph each: 16 graphs for 1024 positions, and
# on average 32 masked keys too many.
KEYS_STEP = 64
SCRIPT_STEP = 64
# Candidates of a sampled token, before top-p: the tail beyond them is what makes small models ramble.
TOP_K = 64


@dataclass(frozen=True)
class Plan:
    """What the rows of a batch are to write.

    openings `[B, F]`: forced first tokens, padded with -1; the row goes on in the role of
    `first_role[row]`. A USER turn ends at end_id or after user_len_max tokens and is followed by
    `after_user [F]`; an ANSWER ends at end_id and is followed by a random row of `after_answer
    [S, F]`. All ids are int64; temperatures `[B]`, 0 is greedy; banned ids are never sampled.
    """

    openings: torch.Tensor
    first_role: torch.Tensor
    after_user: torch.Tensor
    after_answer: torch.Tensor
    end_id: int
    banned_ids: torch.Tensor
    user_temperature: torch.Tensor
    answer_temperature: torch.Tensor
    user_len_max: int
    top_p: float
    max_len: int
    seed: int


@dataclass(frozen=True)
class Written:
    """tokens `[B, max_len]` int64 and their roles `[B, max_len]` int8."""

    tokens: torch.Tensor
    roles: torch.Tensor


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """One token of each row: logits `[B, V]`, temperature `[B]` (0: the likeliest), ids `[B]`.

    The TOP_K likeliest, of these the smallest set with a mass of top_p, then Gumbel noise.
    """
    values, ids = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    scaled = values.float() / temperature.clamp(min=1e-3).unsqueeze(1)
    probabilities = scaled.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    ranked = torch.where(mass_before < top_p, probabilities / noise, 0.0)
    choice = torch.where(temperature > 0, ranked.argmax(dim=-1), 0)
    return ids.gather(1, choice.unsqueeze(1)).squeeze(1)


class LockStepWriter:
    """Storage and graphs for batches of one shape; `write` may be called again and again."""

    def __init__(self, target: DenseTarget, num_rows: int, max_len: int) -> None:
        """Allocates the KV cache: num_rows * max_len tokens."""
        self._target = target
        self._max_len = max_len
        self._kv = target.new_kv(num_rows, max_len)
        self._generator = torch.Generator(target.device)

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        self._tokens = ints(num_rows, max_len + 1)
        self._roles = ints(num_rows, max_len + 1, dtype=torch.int8)
        self._position = ints(1)
        self._current = ints(num_rows)
        self._script = ints(num_rows)
        self._cursor = ints(num_rows)
        self._phase = ints(num_rows)
        self._turn_len = ints(num_rows)
        self._bias = torch.zeros(max_len, device=target.device)
        self._user_temperature = torch.zeros(num_rows, device=target.device)
        self._answer_temperature = torch.zeros(num_rows, device=target.device)
        self._steps: dict[int, Callable[[], None]] = {}
        self._recorded: tuple[float, ...] = ()

    def write(self, plan: Plan, on_step: Callable[[int], None] = lambda step: None) -> Written:
        """Fill every row to plan.max_len tokens. on_step is called with the number of tokens so far."""
        assert plan.openings.shape[0] == self._current.shape[0] and plan.max_len == self._max_len
        self._take(plan)
        for position in range(self._max_len - 1):
            num_keys = min(-(-(position + 1) // KEYS_STEP) * KEYS_STEP, self._max_len)
            if num_keys not in self._steps:
                self._steps[num_keys] = self._prepare(num_keys)
            self._steps[num_keys]()
            on_step(position + 2)
        return Written(self._tokens[:, : self._max_len].clone(), self._roles[:, : self._max_len].clone())

    def _take(self, plan: Plan) -> None:
        """Copy the plan into the static storage that the graphs read."""
        scripts = _stack_scripts(plan)
        num_rows = plan.openings.shape[0]
        # What a recorded graph holds as constants, beside the tables' addresses.
        recorded = (
            *scripts.shape,
            plan.after_answer.shape[0],
            plan.end_id,
            plan.user_len_max,
            plan.top_p,
            *plan.banned_ids.tolist(),
        )
        if recorded != self._recorded:
            device = self._target.device
            self._recorded, self._steps, self._plan = recorded, {}, plan
            self._scripts = scripts.to(device)
            self._banned = plan.banned_ids.to(device)
        self._scripts.copy_(scripts)
        self._user_temperature.copy_(plan.user_temperature)
        self._answer_temperature.copy_(plan.answer_temperature)
        self._generator.manual_seed(plan.seed)
        self._script.copy_(torch.arange(num_rows))
        self._phase.copy_(plan.first_role)
        self._cursor.fill_(1)
        self._turn_len.zero_()
        self._position.zero_()
        self._bias.fill_(float("-inf"))
        self._current.copy_(plan.openings[:, 0])
        self._roles.fill_(FORCED)
        self._tokens[:, 0] = self._current

    def _prepare(self, num_keys: int) -> Callable[[], None]:
        """The step for a number of keys: a captured graph on CUDA, the plain function elsewhere."""
        if self._target.device.type != "cuda":
            return lambda: self._step(num_keys)
        state = [
            self._position,
            self._current,
            self._script,
            self._cursor,
            self._phase,
            self._turn_len,
            self._bias,
            self._tokens,
            self._roles,
        ]
        saved = [tensor.clone() for tensor in state]
        noise_offset = self._generator.get_offset()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(num_keys)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._step(num_keys)
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        self._generator.set_offset(noise_offset)
        return graph.replay

    @torch.no_grad()
    def _step(self, num_keys: int) -> None:
        """Append one token to every row; all state stays on the device."""
        plan = self._plan
        self._bias.index_fill_(0, self._position, 0.0)
        logits = self._target.decode(self._current, self._position, self._kv, num_keys, self._bias)
        logits.index_fill_(1, self._banned, float("-inf"))
        in_user = self._phase == USER
        temperature = torch.where(in_user, self._user_temperature, self._answer_temperature)
        sampled = sample_tokens(logits, temperature, plan.top_p, self._generator)

        forced = self._scripts[self._script, self._cursor]
        in_script = forced >= 0
        overlong = ~in_script & in_user & (self._turn_len >= plan.user_len_max)
        token = torch.where(in_script, forced, torch.where(overlong, plan.end_id, sampled))
        role = torch.where(in_script | overlong, FORCED, self._phase)

        ended = ~in_script & (token == plan.end_id)
        after_user = token.shape[0]  # its place in the table, behind a script for each row
        any_after_answer = torch.randint(
            after_user + 1,
            self._scripts.shape[0],
            token.shape,
            generator=self._generator,
            device=token.device,
        )
        following = torch.where(in_user, after_user, any_after_answer)
        self._script.copy_(torch.where(ended, following, self._script))
        self._cursor.copy_(torch.where(ended, 0, self._cursor + in_script))
        self._turn_len.copy_(torch.where(ended | in_script, 0, self._turn_len + 1))
        self._phase.copy_(torch.where(ended, USER + ANSWER - self._phase, self._phase))

        self._position.add_(1)
        self._current.copy_(token)
        self._tokens.index_copy_(1, self._position, token.unsqueeze(1))
        self._roles.index_copy_(1, self._position, role.to(torch.int8).unsqueeze(1))


def _stack_scripts(plan: Plan) -> torch.Tensor:
    """One table: openings, then after_user, then after_answer; -1 ends a script, and ends every row.

    The width is rounded up, so that plans of much the same shape can share recorded graphs.
    """
    parts = [plan.openings, plan.after_user.unsqueeze(0), plan.after_answer]
    width = (max(part.shape[1] for part in parts) // SCRIPT_STEP + 1) * SCRIPT_STEP
    table = torch.full((sum(part.shape[0] for part in parts), width), -1, dtype=torch.int64)
    start = 0
    for part in parts:
        table[start : start + part.shape[0], : part.shape[1]] = part
        start += part.shape[0]
    return table
