"""Looking up one fact among many: a document of facts and one or more questions about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from demo.lexicon import Lexicon
from demo.sample import Draw, Exchange, Sample
from demo.split import split_key
from demo.words import ANIMALS, COLOURS, JOBS

# Average tokens of a fact, which has 12 to 17. Used to estimate the length of a document.
TOKENS_PER_FACT = 15


class _Relation(NamedTuple):
    """The statements and the questions for one kind of fact. `{n}` is the name, `{v}` the value."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value: Callable[[random.Random, Lexicon], str]


def _digits(count: int) -> Callable[[random.Random, Lexicon], str]:
    def draw(rng: random.Random, lexicon: Lexicon) -> str:
        return str(rng.randint(10 ** (count - 1), 10**count - 1))

    return draw


def _one_of(items: tuple[str, ...]) -> Callable[[random.Random, Lexicon], str]:
    def draw(rng: random.Random, lexicon: Lexicon) -> str:
        return rng.choice(items)

    return draw


def _training_word(rng: random.Random, lexicon: Lexicon) -> str:
    return lexicon.real_word(rng, held_out=False)


_RELATIONS: tuple[_Relation, ...] = (
    _Relation(
        ("The locker code of {n} is {v}.", "{n} has the locker code {v}."),
        ("What is the locker code of {n}?", "Which locker code does {n} have?"),
        _digits(4),
    ),
    _Relation(
        ("The room of {n} is {v}.", "{n} sits in room {v}."),
        ("What is the room of {n}?", "In which room does {n} sit?", "Where does {n} sit?"),
        _digits(3),
    ),
    _Relation(
        ("The password of {n} is {v}.", "{n} uses the password {v}."),
        ("What is the password of {n}?", "Which password does {n} use?"),
        _training_word,
    ),
    _Relation(
        ("The favourite colour of {n} is {v}.", "{n} likes the colour {v}."),
        ("What is the favourite colour of {n}?", "Which colour does {n} like?"),
        _one_of(COLOURS),
    ),
    _Relation(
        ("The pet of {n} is a {v}.", "{n} keeps a {v}."),
        ("What is the pet of {n}?", "Which animal does {n} keep?"),
        _one_of(ANIMALS),
    ),
    _Relation(
        ("The job of {n} is {v}.", "{n} works as a {v}."),
        ("What is the job of {n}?", "What does {n} work as?"),
        _one_of(JOBS),
    ),
    _Relation(
        ("{n}: {v}", "{n} = {v}"),
        ("What is the entry for {n}?", "Which value belongs to {n}?"),
        _digits(4),
    ),
)
_HEADERS = (
    "Here are some notes.",
    "Read these facts.",
    "Use the following list.",
    "These are our records.",
    "Here is the directory.",
    "Facts:",
)
_ASK = ("{q}", "Question: {q}", "Now tell me: {q}", "{q} Answer with the value only.")


def name_key(name: str) -> str:
    """Return the split key of a person."""
    return split_key("name", name)


def lookup(draw: Draw) -> Sample:
    """Ask about a short document of 3 to 20 facts."""
    return document(draw, draw.rng.randint(3, 20))


def document(draw: Draw, facts: int, max_questions: int = 3) -> Sample:
    """Ask 1 to `max_questions` questions about a document of `facts` facts.

    Every name occurs once. Seven documents in ten state one kind of fact, the others mix all
    kinds. The evaluation asks one question per document.
    """
    rng = draw.rng
    names = draw.lexicon.distinct_names(rng, draw.held_out, facts)
    shared = rng.choice(_RELATIONS)
    mixed = rng.random() < 0.3
    lines: list[str] = []
    values: list[tuple[_Relation, str]] = []
    for name in names:
        relation = rng.choice(_RELATIONS) if mixed else shared
        value = relation.value(rng, draw.lexicon)
        values.append((relation, value))
        lines.append(rng.choice(relation.statements).format(n=name, v=value))
    questions = 1 if draw.held_out else rng.randint(1, max_questions)
    picks = rng.sample(range(facts), min(questions, facts))
    asked = [
        (rng.choice(_ASK).format(q=rng.choice(values[i][0].questions).format(n=names[i])), i)
        for i in picks
    ]
    parts = ["\n".join(lines), asked[0][0]]
    if rng.random() < 0.15:
        parts.reverse()
    elif rng.random() < 0.7:
        parts.insert(0, rng.choice(_HEADERS))
    users = ["\n".join(parts), *(question for question, _ in asked[1:])]
    exchanges = tuple(
        Exchange(user, values[i][1]) for user, (_, i) in zip(users, asked, strict=True)
    )
    return Sample("lookup", exchanges, frozenset(map(name_key, names)))
