"""Vocabulary decodes to the same text as the tokenizers library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from minisgl.core import ConfigError
from minisgl.tokenizer.vocab import Vocabulary
from tests.unit.tokenizer.conftest import byte_level, sentencepiece

BYTE_LEVEL = byte_level()
BYTES = Vocabulary.of(BYTE_LEVEL)
SENTENCEPIECE = sentencepiece()
PIECES = Vocabulary.of(SENTENCEPIECE)


@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40),
    st.booleans(),
)
def test_byte_level_decode_equals_the_library_for_any_ids(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_sentencepiece_decode_equals_the_library_for_any_text(text: str) -> None:
    """The library strips the one leading space of a whole text; a continuation keeps it."""
    words = [f"<0x{byte:02X}>" for byte in text.encode()]
    ids = [SENTENCEPIECE.token_to_id(word) for word in ["▁hello", *words]]
    assert PIECES.decode(ids) == " " + SENTENCEPIECE.decode(ids)


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    """Logits are padded: such an id must not crash (OverflowError in other systems)."""
    assert BYTES.decode([BYTE_LEVEL.get_vocab_size(), 2**31 - 1, -1]) == ""


def test_special_tokens_are_skipped_only_when_asked() -> None:
    eos = BYTE_LEVEL.token_to_id("<eos>")
    assert BYTES.decode([eos]) == ""
    assert BYTES.decode([eos], skip_special=False) == "<eos>"
    assert BYTES.decode([BYTE_LEVEL.token_to_id("<think> now")]) == "<think> now"


def test_the_tokens_around_the_thinking_of_gemma_4_are_found() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|channel>", "<channel|>"])
    found = Vocabulary.of(tokenizer)
    ids = tuple(tokenizer.token_to_id(text) for text in ("<|channel>", "<channel|>"))
    assert (found.think_ids, found.think_name) == (ids, "thought")
    assert (BYTES.think_ids, BYTES.think_name) == ((-1, -1), "")


def test_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Vocabulary.of(tokenizer)
