"""Words, names and places, for training or for the evaluation (the two sides of demo.split).

Real words come from `demo.words`. Most training words are pseudo-words of syllables and tokenizer
pieces, because the model must learn the letters of every piece to spell an unseen word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo.split import is_held_out, split_key
from demo.words import FIRST_NAMES, PLACES, WORDS


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _listed(
    "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sk sl st th tr"
)
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ee", "ou")
_CODAS = ("", "", "", "n", "r", "l", "s", "m", "t", "nd", "ck", "x", "rk", "st")
_NAME_ONSETS = _listed("b d f g h j k l m n p r s t v z b d k l m n r s t br ch dr sh tr")
_NAME_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ia")
_NAME_ENDS = ("", "", "", "n", "r", "l", "s", "k", "m", "th")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_WORD_LETTERS = 10


def _syllables(rng: random.Random, count: int) -> str:
    choice = rng.choice
    return "".join(choice(_ONSETS) + choice(_VOWELS) + choice(_CODAS) for _ in range(count))


def _made_up_name(rng: random.Random) -> str:
    """Return a name that is easy to say: every syllable except the last ends in a vowel."""
    choice = rng.choice
    syllables = [choice(_NAME_ONSETS) + choice(_NAME_VOWELS) for _ in range(choice((2, 2, 3)))]
    return ("".join(syllables) + choice(_NAME_ENDS)).capitalize()


class Lexicon:
    """Draws items of one side of the split; immutable after construction.

    pieces: the tokens of the tokenizer that consist of letters. While the tokenizer itself is being
    trained there are none, and pseudo-words consist of syllables and letters alone.
    """

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self._pieces = tuple(sorted({p.lower() for p in pieces if p.isalpha() and p.isascii()}))
        self._words = {
            side: tuple(w for w in WORDS if is_held_out(split_key("word", w)) == side)
            for side in (False, True)
        }

    def _candidate_word(self, rng: random.Random) -> str:
        kind = rng.random()
        if self._pieces and kind < 0.5:
            return "".join(rng.choices(self._pieces, k=rng.choice((1, 2, 2, 3))))
        if kind < 0.85:
            return _syllables(rng, rng.choice((1, 2, 2, 3)))
        return "".join(rng.choices(_LETTERS, k=rng.randint(3, 8)))

    def real_word(self, rng: random.Random, held_out: bool) -> str:
        """Draw an English word."""
        return rng.choice(self._words[held_out])

    def word(self, rng: random.Random, held_out: bool, real_share: float = 0.4) -> str:
        """Draw a lower-case word of 3 to 10 letters; `real_share` of the draws are English.

        In training the share is half of that: the model soon knows some 800 words by heart, and it
        must learn to treat every piece alike.
        """
        if rng.random() < (real_share if held_out else real_share / 2):
            return self.real_word(rng, held_out)
        while True:
            word = self._candidate_word(rng)
            if 3 <= len(word) <= MAX_WORD_LETTERS and (
                is_held_out(split_key("word", word)) == held_out
            ):
                return word

    def name(self, rng: random.Random, held_out: bool, real_share: float = 0.3) -> str:
        """Draw a capitalised first name, English or made up."""
        return self._proper(rng, held_out, "name", FIRST_NAMES, real_share)

    def place(self, rng: random.Random, held_out: bool, real_share: float = 0.3) -> str:
        """Draw the name of a town or country, real or made up."""
        return self._proper(rng, held_out, "place", PLACES, real_share)

    def _proper(
        self,
        rng: random.Random,
        held_out: bool,
        kind: str,
        real: Sequence[str],
        real_share: float,
    ) -> str:
        while True:
            item = rng.choice(real) if rng.random() < real_share else _made_up_name(rng)
            if len(item) <= 11 and is_held_out(split_key(kind, item)) == held_out:
                return item

    def distinct_words(
        self, rng: random.Random, held_out: bool, count: int, real_share: float = 0.6
    ) -> list[str]:
        """Draw `count` different words with different first letters."""
        chosen: dict[str, str] = {}
        while len(chosen) < count:
            word = self.word(rng, held_out, real_share)
            chosen.setdefault(word[0], word)
        return list(chosen.values())

    def distinct_names(self, rng: random.Random, held_out: bool, count: int) -> list[str]:
        """Draw `count` different names, most of them made up."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.name(rng, held_out, real_share=0.1)] = None
        return list(chosen)
