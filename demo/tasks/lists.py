"""Sorting words and numbers."""

from __future__ import annotations

import random

from demo.sample import Draw, Sample, single
from demo.split import is_held_out, split_key
from demo.tasks.letters import listing, word_key

LARGEST_NUMBER = 99
_SMALLER_RANGES = (9, 20)

_WORDS_UP = (
    "Sort these words alphabetically: {list}",
    "Sort these words: {list}",
    "Put these words in alphabetical order: {list}.",
    "Sort alphabetically: {list}",
    "Please sort {list}.",
    "Arrange these words from A to Z: {list}",
    "What is the alphabetical order of {list}?",
    "Sort the list {list}.",
)
_WORDS_DOWN = (
    "Sort these words from Z to A: {list}",
    "Sort in reverse alphabetical order: {list}",
    "Put these words in reverse alphabetical order: {list}.",
)
_NUMBERS_UP = (
    "Sort these numbers: {list}",
    "Sort {list}.",
    "Sort these numbers from smallest to largest: {list}",
    "Put these numbers in ascending order: {list}.",
    "Arrange {list} from low to high.",
    "Please sort the numbers {list}.",
    "Order these numbers: {list}",
)
_NUMBERS_DOWN = (
    "Sort these numbers from largest to smallest: {list}",
    "Put these numbers in descending order: {list}.",
    "Arrange {list} from high to low.",
)


def numbers_key(numbers: list[int]) -> str:
    """Return the split key of a set of numbers. The order of the numbers does not change it."""
    return split_key("numbers", " ".join(map(str, sorted(numbers))))


def draw_numbers(rng: random.Random, held_out: bool) -> list[int]:
    """Draw 3 to 6 different numbers of one side of the split, in random order."""
    while True:
        largest = rng.choice((*_SMALLER_RANGES, *(LARGEST_NUMBER,) * 6))
        numbers = rng.sample(range(largest + 1), rng.randint(3, 6))
        if is_held_out(numbers_key(numbers)) == held_out:
            return numbers


def sorting(draw: Draw) -> Sample:
    """Ask for 3 to 6 items in order; the answer joins them with commas."""
    rng = draw.rng
    descending = rng.random() < 0.25
    if rng.random() < 0.5:
        numbers = draw_numbers(rng, draw.held_out)
        keys = [numbers_key(numbers)]
        items = [str(n) for n in numbers]
        ordered = [str(n) for n in sorted(numbers, reverse=descending)]
        phrases = _NUMBERS_DOWN if descending else _NUMBERS_UP
    else:
        items = draw.lexicon.distinct_words(rng, draw.held_out, rng.randint(3, 6), 0.7)
        keys = [word_key(word) for word in items]
        ordered = sorted(items, reverse=descending)
        phrases = _WORDS_DOWN if descending else _WORDS_UP
    user = rng.choice(phrases).format(list=listing(rng, items))
    return single("sorting", user, ", ".join(ordered), keys)
