"""Tasks on the letters of one word, and counting."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo.sample import Draw, Sample, single
from demo.split import split_key

_SPELL = (
    "Spell the word {w}.",
    "Spell {w}.",
    "How do you spell {w}?",
    'Spell "{w}" letter by letter.',
    "Spell the word '{w}' letter by letter.",
    "Please spell {w} for me.",
    "Can you spell the word {w}?",
    "Write {w} letter by letter.",
    "What are the letters of {w}?",
    "Give me the letters of the word {w}.",
    "spell {w}",
)
_REVERSE = (
    "Reverse the word {w}.",
    "Reverse {w}.",
    "Write {w} backwards.",
    'What is "{w}" backwards?',
    "What is {w} spelled backwards?",
    "Please reverse the word '{w}'.",
    "Can you write {w} in reverse?",
    "Turn the word {w} around.",
    "Give me {w} backwards.",
    "Spell {w} backwards.",
    "reverse {w}",
)
_COUNT_LETTERS = (
    "How many letters are in the word {w}?",
    "How many letters does {w} have?",
    "Count the letters in {w}.",
    'How many letters are there in "{w}"?',
    "Count the letters of the word '{w}'.",
    "How long is the word {w}?",
)
_COUNT_ONE_LETTER = (
    "How many times does the letter {c} appear in {w}?",
    "How often is the letter {c} in the word {w}?",
    'Count the letter {c} in "{w}".',
    "How many {c}'s are in {w}?",
    "How many times does {c} occur in the word {w}?",
)
_COUNT_ITEMS = (
    "How many items are in this list: {list}?",
    "How many words are in this list: {list}?",
    "Count the items: {list}",
    "Count these words: {list}.",
    "How many things do I list here? {list}",
    "I have {list}. How many things is that?",
)
_COUNT_ONE_ITEM = (
    "How many times does {w} appear in this list: {list}?",
    "How often does the word {w} occur here: {list}?",
    "Count the word {w} in: {list}",
    'How many times is "{w}" in this list? {list}',
)


def word_key(word: str) -> str:
    """Return the split key of a word."""
    return split_key("word", word)


def listing(rng: random.Random, items: Sequence[str]) -> str:
    """Write items as a list, mostly separated by commas."""
    style = rng.random()
    if style < 0.75:
        return ", ".join(items)
    if style < 0.9:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return " ".join(items)


def _one_word(draw: Draw) -> str:
    word = draw.lexicon.word(draw.rng, draw.held_out)
    return word.capitalize() if draw.rng.random() < 0.1 else word


def spelling(draw: Draw) -> Sample:
    """Ask for the letters of a word; the answer joins them with hyphens."""
    word = _one_word(draw)
    user = draw.rng.choice(_SPELL).format(w=word)
    return single("spelling", user, "-".join(word), [word_key(word)])


def reversing(draw: Draw) -> Sample:
    """Ask for a word backwards."""
    word = _one_word(draw)
    user = draw.rng.choice(_REVERSE).format(w=word)
    return single("reversing", user, word[::-1], [word_key(word)], by_letter=True)


def counting(draw: Draw) -> Sample:
    """Ask for a number of letters or list items; the answer is the number alone."""
    return draw.rng.choice((_letters, _one_letter, _one_letter, _items, _one_item))(draw)


def _letters(draw: Draw) -> Sample:
    word = _one_word(draw)
    user = draw.rng.choice(_COUNT_LETTERS).format(w=word)
    return single("counting", user, str(len(word)), [word_key(word)])


def _one_letter(draw: Draw) -> Sample:
    word = draw.lexicon.word(draw.rng, draw.held_out)
    letter = draw.rng.choice(word if draw.rng.random() < 0.85 else "aeiourstln")
    user = draw.rng.choice(_COUNT_ONE_LETTER).format(c=letter, w=word)
    return single("counting", user, str(word.count(letter)), [word_key(word)])


def _items(draw: Draw) -> Sample:
    words = [draw.lexicon.word(draw.rng, draw.held_out, 0.7) for _ in range(draw.rng.randint(2, 9))]
    user = draw.rng.choice(_COUNT_ITEMS).format(list=listing(draw.rng, words))
    return single("counting", user, str(len(words)), map(word_key, words))


def _one_item(draw: Draw) -> Sample:
    rng = draw.rng
    pool = draw.lexicon.distinct_words(rng, draw.held_out, 3)
    times = rng.randint(1, 5)
    words = [pool[0]] * times + rng.choices(pool[1:], k=rng.randint(1, 4))
    rng.shuffle(words)
    user = rng.choice(_COUNT_ONE_ITEM).format(w=pool[0], list=listing(rng, words))
    return single("counting", user, str(times), map(word_key, words))
