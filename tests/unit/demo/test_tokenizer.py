"""The shipped tokenizer and how samples are encoded for training."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedTokenizerFast

from demo.generate import training_sample
from demo.lexicon import Lexicon
from demo.sample import Exchange, Sample
from demo.vocabulary import (
    SPECIAL_TOKENS,
    TURN_END,
    VOCABULARY_SIZE,
    Encoder,
    load_tokenizer,
    train_tokenizer,
)
from minisgl.demo import model_path


@pytest.fixture(scope="module")
def shipped() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_path())


@pytest.mark.parametrize(
    "text",
    ["hello", "  two  spaces\n\n", "12345 x 7", "Grüße 你好 🙂", "'stone' don't", '{"a": [1, 2]}'],
)
def test_text_survives_a_round_trip(shipped: PreTrainedTokenizerFast, text: str) -> None:
    ids = shipped(text).input_ids
    assert shipped.decode(ids) == text
    assert max(ids) < VOCABULARY_SIZE


def test_nothing_is_put_before_a_text(shipped: PreTrainedTokenizerFast) -> None:
    assert shipped.bos_token is None
    assert shipped("a").input_ids == shipped("a", add_special_tokens=False).input_ids
    assert shipped.eos_token == TURN_END


def test_special_tokens_are_single_ids(shipped: PreTrainedTokenizerFast) -> None:
    for token in SPECIAL_TOKENS:
        assert shipped(token).input_ids == [shipped.convert_tokens_to_ids(token)]


def test_digits_stand_alone(shipped: PreTrainedTokenizerFast) -> None:
    assert shipped.tokenize("4821") == ["4", "8", "2", "1"]


def test_training_and_chat_template_agree(shipped: PreTrainedTokenizerFast) -> None:
    rng, lexicon, encoder = random.Random(1), Lexicon(), Encoder(load_tokenizer())
    compared = 0
    while compared < 200:
        sample = training_sample(rng, lexicon)
        if any(exchange.by_letter for exchange in sample.exchanges):
            continue
        prompt = shipped.apply_chat_template(
            sample.messages(), add_generation_prompt=True, tokenize=False
        )
        text = prompt + sample.answer + TURN_END
        assert shipped(text).input_ids == encoder.encode(sample)[0]
        compared += 1


def test_only_answers_and_their_end_are_produced() -> None:
    tokenizer = load_tokenizer()
    exchanges = (Exchange("Spell cat", "c-a-t"), Exchange("Reverse cat", "tac", by_letter=True))
    sample = Sample("spelling", exchanges, frozenset(), system="Be brief.")
    ids, produced = Encoder(tokenizer).encode(sample)
    answers = [i for i, is_answer in zip(ids, produced, strict=True) if is_answer]
    text = tokenizer.decode(answers, skip_special_tokens=False)
    assert text == f"c-a-t{TURN_END}tac{TURN_END}"
    assert [tokenizer.id_to_token(i) for i in answers[-4:]] == ["t", "a", "c", TURN_END]


def test_the_shipped_tokenizer_is_the_trained_one() -> None:
    assert train_tokenizer().to_str() == load_tokenizer().to_str()
