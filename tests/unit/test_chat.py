"""Text to tokens and back: chat templates in their sandbox, and text streamed token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CheckpointError
from tests.builders_chat import write_tokenizer
from tools.chat import ChatTokenizer, TextStream

HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_conversation_ends_where_the_assistant_begins(tokenizer: ChatTokenizer) -> None:
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(HELLO) == text
    ids = tokenizer.encode_chat(HELLO)
    assert ids.count(1) == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids) == "user\nthe cat\nassistant\n"


def test_a_template_may_name_special_tokens_given_as_text_or_as_objects(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, template="{{ bos_token }}{{ eos_token }}")
    assert ChatTokenizer(directory).render_chat(HELLO) == "<|im_start|><|im_end|>"


def test_a_template_beside_the_configuration_comes_first(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text("beside")
    assert ChatTokenizer(tmp_path).render_chat(HELLO) == "beside"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'tokenizer.json' %}",
    ],
)
def test_a_hostile_or_failing_template_is_one_error(tmp_path: Path, template: str) -> None:
    chat = ChatTokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(CheckpointError, match="^chat_template: "):
        chat.render_chat(HELLO)


@pytest.mark.parametrize("template", ["{% for %}", ["a", "list"]])
def test_what_is_no_template_is_refused_at_load(tmp_path: Path, template: object) -> None:
    with pytest.raises(CheckpointError, match="^chat_template: "):
        ChatTokenizer(write_tokenizer(tmp_path, template=template))


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    chat = ChatTokenizer(write_tokenizer(tmp_path, template=None))
    assert chat.encode("the cat")
    with pytest.raises(CheckpointError, match="^chat_template: "):
        chat.encode_chat(HELLO)


@pytest.mark.parametrize("damaged", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "", "[]", '{"model": 3'])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, damaged: str, content: str | None) -> None:
    file = write_tokenizer(tmp_path) / damaged
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointError, match=f"^{damaged}: "):
        ChatTokenizer(tmp_path)


def test_a_character_spread_over_tokens_comes_out_whole(tokenizer: ChatTokenizer) -> None:
    text = "a€b"
    ids = tokenizer.encode(text)
    assert len(ids) == 5, "the euro sign must be three tokens here"
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "€", "b"]
    assert stream.finish() == ""


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end(tokenizer: ChatTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("a€")[:-1]) == ""
    assert stream.finish() == "a\ufffd"
    assert stream.finish() == ""


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 3), max_size=60))
def test_pieces_of_any_text_join_to_the_text_without_half_characters(
    tokenizer: ChatTokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text)
    stream, pieces = TextStream(tokenizer), []
    for width in [*cuts, *[1] * len(ids)]:
        chunk, ids = ids[:width], ids[width:]
        pieces.append(stream.push(chunk))
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 299), max_size=60))
def test_pieces_of_any_ids_join_to_what_decoding_all_gives(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    ids = [i % tokenizer.vocab_size for i in ids]
    stream = TextStream(tokenizer)
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == tokenizer.decode(ids)
