"""The first stage: the target writes conversations with itself, or answers prompts from a file.

It gets the chat template up to the user's turn, perhaps with a few first words, and goes on from there: the
text is on its own distribution and unlimited. Never give this stage prompts of an evaluation set.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.errors import ConfigError
from tools.chat import ChatTokenizer
from tools.train import openers
from tools.train.corpus import Corpus, load_shards, save_shard
from tools.train.dense_target import DenseTarget
from tools.train.generate import ANSWER, USER, LockStepWriter, Plan
from tools.train.loops import kept_lengths

_USER_MARK, _ANSWER_MARK = "\x01user\x01", "\x01answer\x01"
HELD_OUT = "held-out.safetensors"
# Many openings after an answer to draw from; more only make the table larger.
FOLLOW_UPS = 512


@dataclass(frozen=True)
class SynthesisSettings:
    """How much is written, and how. Rows are conversations of max_len tokens, before loops are cut."""

    num_rows: int = 65536
    held_out_rows: int = 256
    rows_at_once: int = 2048
    max_len: int = 1024
    user_len_max: int = 160
    top_p: float = 0.95
    user_temperature: tuple[float, float] = (0.9, 1.0)
    # Wider than what people use: near 0 shows the draft the texts of greedy decoding as well.
    answer_temperature: tuple[float, float] = (0.3, 0.9)
    # Held-out answers: half greedy, half sampled, so that acceptance can be told for both.
    held_out_temperatures: tuple[float, float] = (0.0, 0.8)
    opener_share: float = 0.6
    prompt_share: float = 0.5
    seed: int = 0


class ChatFrame:
    """The fixed pieces of a chat template, found by rendering marks through it.

    before_user + words is where a conversation starts; after_user and after_answer follow the end token
    of a turn. Token ids without that end token.
    """

    def __init__(self, tokenizer: ChatTokenizer, end_id: int) -> None:
        """Raises ConfigError when the template ends turns otherwise than with end_id."""
        self._tokenizer = tokenizer
        mark = {"role": "user", "content": _USER_MARK}
        one = tokenizer.render_chat([mark])
        more = tokenizer.render_chat([mark, {"role": "assistant", "content": _ANSWER_MARK}, mark])
        self.before_user, self._after_user_text = one.split(_USER_MARK)
        between = more.split(_ANSWER_MARK)[1].split(_USER_MARK)[0]
        self.after_user = _behind(end_id, tokenizer.encode(self._after_user_text))
        self._between = between
        _behind(end_id, tokenizer.encode(between))
        self._end_id = end_id

    def opening(self, words: str) -> list[int]:
        """Template and first words; the user's turn goes on."""
        return self._tokenizer.encode(self.before_user + words)

    def question(self, prompt: str) -> list[int]:
        """Template and a whole user turn; the answer follows."""
        return self._tokenizer.encode(self.before_user + prompt + self._after_user_text)

    def follow_up(self, words: str) -> list[int]:
        """What comes after an answer's end token: the next user turn's first words."""
        return _behind(self._end_id, self._tokenizer.encode(self._between + words))


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSONL file: an object with a `prompt` a line. Raises ConfigError naming the line."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                "prompts", 'must have {"prompt": "..."} in each line', given=f"line {number}"
            ) from None
        prompts.append(str(prompt))
    if not prompts:
        raise ConfigError("prompts", "must have at least one line", given=0)
    return prompts


def special_ids(model_dir: Path) -> list[int]:
    """Ids of the tokenizer's control tokens: they have no place inside a turn."""
    added = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return [token["id"] for token in added if token["special"]]


def make_plan(
    frame: ChatFrame,
    settings: SynthesisSettings,
    end_id: int,
    banned_ids: list[int],
    prompts: list[str],
    num_rows: int,
    seed: int,
    *,
    held_out: bool,
) -> Plan:
    """What a shard's rows are to write; everything follows from the seed."""
    rng = random.Random(seed)
    openings: list[list[int]] = []
    roles: list[int] = []
    for _ in range(num_rows):
        words = openers.draw_opener(rng) if rng.random() < settings.opener_share else ""
        if prompts and rng.random() < settings.prompt_share:
            opening = frame.question(rng.choice(prompts))
        elif words.endswith(("?", ".")):
            opening = frame.question(words)
        else:
            openings.append(frame.opening(words))
            roles.append(USER)
            continue
        openings.append(opening[: settings.max_len // 2])
        roles.append(ANSWER)
    # Most follow-ups are left to the target; whole questions need a fresh conversation.
    follow_ups = [""] * (FOLLOW_UPS // 2)
    while len(follow_ups) < FOLLOW_UPS:
        words = openers.draw_opener(rng)
        if not words.endswith(("?", ".")):
            follow_ups.append(words)
    low, high = settings.user_temperature
    user_temperature = torch.tensor([rng.uniform(low, high) for _ in range(num_rows)])
    if held_out:
        answer_temperature = torch.tensor([settings.held_out_temperatures[i % 2] for i in range(num_rows)])
    else:
        low, high = settings.answer_temperature
        answer_temperature = torch.tensor([rng.uniform(low, high) for _ in range(num_rows)])
    return Plan(
        openings=_pad(openings),
        first_role=torch.tensor(roles),
        after_user=torch.tensor(frame.after_user),
        after_answer=_pad([frame.follow_up(words) for words in follow_ups]),
        end_id=end_id,
        banned_ids=torch.tensor([i for i in banned_ids if i != end_id], dtype=torch.int64),
        user_temperature=user_temperature,
        answer_temperature=answer_temperature,
        user_len_max=settings.user_len_max,
        top_p=settings.top_p,
        max_len=settings.max_len,
        seed=seed,
    )


def synthesize(
    target: DenseTarget,
    frame: ChatFrame,
    settings: SynthesisSettings,
    banned_ids: list[int],
    prompts: list[str],
    directory: Path,
    on_tokens: Callable[[int, int], None],
) -> tuple[Corpus, Corpus]:
    """Write what is missing in `directory` and return (training corpus, held-out corpus) on the CPU.

    on_tokens(done, total) counts tokens of all rows, learnable or not.
    """
    end_id = target.config.eos_token_ids[0]
    num_shards = -(-settings.num_rows // settings.rows_at_once)
    shards = [(directory / HELD_OUT, settings.held_out_rows, True)]
    shards += [
        (directory / f"shard-{i:04}.safetensors", settings.rows_at_once, False) for i in range(num_shards)
    ]
    total = sum(rows for _, rows, _ in shards) * settings.max_len
    done = 0
    writers: dict[int, LockStepWriter] = {}
    for number, (path, num_rows, held_out) in enumerate(shards):
        if not path.exists():
            if num_rows not in writers:
                writers.clear()  # the KV cache is most of the memory
                writers[num_rows] = LockStepWriter(target, num_rows, settings.max_len)
            seed = settings.seed * 1_000_003 + number
            plan = make_plan(frame, settings, end_id, banned_ids, prompts, num_rows, seed, held_out=held_out)
            on_step = partial(_count_tokens, on_tokens, done, num_rows, total)
            written = writers[num_rows].write(plan, on_step)
            shard = Corpus(
                written.tokens.int(), written.roles, kept_lengths(written.tokens), plan.answer_temperature
            )
            save_shard(shard, path)
        done += num_rows * settings.max_len
        on_tokens(done, total)
    held_out_corpus, training = load_shards([shards[0][0]]), load_shards([path for path, _, _ in shards[1:]])
    return training.worth_learning(), held_out_corpus.worth_learning()


def _count_tokens(
    on_tokens: Callable[[int, int], None], before: int, num_rows: int, total: int, tokens_each: int
) -> None:
    on_tokens(before + num_rows * tokens_each, total)


def _behind(end_id: int, ids: list[int]) -> list[int]:
    if not ids or ids[0] != end_id:
        raise ConfigError("chat_template", f"must end a turn with token {end_id}", given=ids[:1])
    return ids[1:]


def _pad(rows: list[list[int]]) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64)
