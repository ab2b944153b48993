"""The sample that a generator returns: a conversation with one right answer per assistant turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from demo.lexicon import Lexicon


class Exchange(NamedTuple):
    """One user turn and its right answer.

    by_letter: the answer is trained as one token per character, because a reversed word has no
    pieces that the model knows. The decoded text is the same.
    """

    user: str
    assistant: str
    by_letter: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation of one task.

    keys: the split keys of all words, names, operands or wordings that the conversation uses.
    """

    task: str
    exchanges: tuple[Exchange, ...]
    keys: frozenset[str]
    system: str | None = None

    @property
    def answer(self) -> str:
        return self.exchanges[-1].assistant

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt as chat messages: everything but the last answer."""
        out = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            out.append({"role": "user", "content": exchange.user})
            out.append({"role": "assistant", "content": exchange.assistant})
        return out[:-1]


def single(
    task: str, user: str, assistant: str, keys: Iterable[str], by_letter: bool = False
) -> Sample:
    """Build a sample of one exchange."""
    return Sample(task, (Exchange(user, assistant, by_letter),), frozenset(keys))


class Draw(NamedTuple):
    """The inputs of every generator: random source, words, and the side of the split."""

    rng: random.Random
    lexicon: Lexicon
    held_out: bool


Generator = Callable[[Draw], Sample]
