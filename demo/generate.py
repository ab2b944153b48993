"""Streams of samples: the training mixture and the held-out prompts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from demo.lexicon import Lexicon
from demo.sample import Draw, Sample
from demo.tasks import GENERATORS, TOOL_TASKS

# Relative shares in training. The tasks on unseen words need the largest shares.
MIXTURE: dict[str, int] = {
    "arithmetic": 7,
    "spelling": 3,
    "reversing": 4,
    "sorting": 6,
    "counting": 9,
    "lookup": 2,
    "json": 3,
    "conversation": 3,
    "greeting": 2,
    "tool-call": 1,
    "tool-choice": 3,
    "tool-result": 1,
    "tool-none": 3,
    "tool-parallel": 2,
}
SYSTEM_MESSAGES: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant. Answer briefly.",
    "Be concise.",
    "You are minisgl, a small demo model.",
    "Answer the question of the user.",
    "You are a friendly bot.",
    "Follow the instructions exactly.",
)
_SYSTEM_SHARE = 0.12
_MEDLEY_SHARE = 0.15
# Tasks whose requests some users type without a capital or a full stop. In the other tasks the case
# or the wording is part of the question.
_INFORMAL_TASKS = frozenset({"arithmetic", "spelling", "reversing", "sorting", "counting"})
_INFORMAL_SHARE = 0.15
_FIRST_WORDS = frozenset(
    {"Add", "Arrange", "Calculate", "Can", "Compute", "Count", "Give", "How", "I", "Multiply"}
    | {"Order", "Please", "Put", "Reverse", "Sort", "Spell", "Subtract", "Take", "Tell", "Turn"}
    | {"What", "Write"}
)


def with_system(rng: random.Random, sample: Sample) -> Sample:
    """Put a short system message before one sample in eight."""
    if rng.random() >= _SYSTEM_SHARE:
        return sample
    return dataclasses.replace(sample, system=rng.choice(SYSTEM_MESSAGES))


def informal(rng: random.Random, sample: Sample) -> Sample:
    """Write some requests in lower case and some without their last full stop."""
    if sample.task not in _INFORMAL_TASKS or rng.random() >= _INFORMAL_SHARE:
        return sample
    exchange = sample.exchanges[0]
    user = exchange.user
    # A first word without a space after it, or in a list, belongs to the question.
    if user.split(" ")[0] in _FIRST_WORDS:
        user = user[0].lower() + user[1:]
    if rng.random() < 0.5:
        user = user.rstrip(".?")
    return dataclasses.replace(sample, exchanges=(exchange._replace(user=user),))


def training_sample(rng: random.Random, lexicon: Lexicon) -> Sample:
    """Draw a sample from the mixture. Some samples join several tasks in one conversation.

    The tools of a conversation are the same in all its turns, so a tool task stands alone.
    """
    draw = Draw(rng, lexicon, held_out=False)
    turns = rng.choice((2, 2, 3, 4)) if rng.random() < _MEDLEY_SHARE else 1
    tasks = rng.choices(tuple(MIXTURE), weights=tuple(MIXTURE.values()), k=turns)
    if tasks[0] in TOOL_TASKS:
        return with_system(rng, TOOL_TASKS[tasks[0]](draw))
    samples = [informal(rng, GENERATORS[task](draw)) for task in tasks if task not in TOOL_TASKS]
    return with_system(rng, joined(samples))


def joined(samples: Sequence[Sample]) -> Sample:
    """Put samples after one another in one conversation."""
    return Sample(
        samples[-1].task,
        tuple(exchange for sample in samples for exchange in sample.exchanges),
        frozenset().union(*(sample.keys for sample in samples)),
    )


def held_out_samples(seed: int, task: str, count: int, lexicon: Lexicon) -> list[Sample]:
    """Return `count` held-out samples of a task with different prompts."""
    draw = Draw(random.Random(f"held-out {seed} {task}"), lexicon, held_out=True)
    chosen: dict[str, Sample] = {}
    while len(chosen) < count:
        sample = GENERATORS[task](draw)
        chosen.setdefault("\n".join(e.user for e in sample.exchanges), sample)
    return list(chosen.values())
