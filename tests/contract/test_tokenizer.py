"""TextTokenizer gives the same results as transformers on the demo model."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from minisgl.demo import evaluation_path, model_path
from minisgl.message.messages import TextOptions
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    return TextTokenizer(model_path())


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_path())


def test_chats_of_the_evaluation_have_the_same_ids(
    ours: TextTokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    rows = [json.loads(line) for line in evaluation_path().read_text().splitlines()]
    chats = [row["messages"] for row in rows if "messages" in row][:200]
    assert chats
    for chat in chats:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(chat) == expected


@pytest.mark.parametrize("text", ["hello world", "é€😀 \n\t x", "<|im_end|> a", " ", "\ufffd\0"])
def test_texts_encode_decode_and_stream_alike(
    ours: TextTokenizer, theirs: PreTrainedTokenizerFast, text: str
) -> None:
    ids = theirs(text)["input_ids"]
    assert ours.encode_text(text) == ids
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.vocabulary.decode(ids, skip) == expected
        stream = TextStream(ours.vocabulary, TextOptions(skip_special_tokens=skip))
        assert "".join([*(stream.push([id_]) for id_ in ids), stream.finish()]) == expected
