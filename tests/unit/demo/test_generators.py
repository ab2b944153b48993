"""The generators: right answers, one result per seed, and no overlap between the two sides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import count, islice

import pytest

from demo.generate import MIXTURE, held_out_samples, training_sample
from demo.lexicon import Lexicon
from demo.sample import Draw, Sample
from demo.split import is_held_out
from demo.tasks import GENERATORS, TOOL_TASKS
from demo.tasks.numbers import operand_key
from tests.unit.demo.oracle import CHECKS

_PIECES = ("ing", "ter", "ou", "sta", "cat")


@cache
def _drawn(task: str, held_out: bool) -> tuple[list[Sample], Iterator[Sample]]:
    """Return a list for the samples that have been drawn, and an iterator over all others."""
    draw = Draw(random.Random(f"{task} {held_out}"), Lexicon(_PIECES), held_out)
    return [], (GENERATORS[task](draw) for _ in count())


def _draw(task: str, held_out: bool, number: int) -> list[Sample]:
    """Return the first samples of this kind, always the same."""
    drawn, others = _drawn(task, held_out)
    drawn += islice(others, max(0, number - len(drawn)))
    return drawn[:number]


def test_every_task_is_trained_and_checked() -> None:
    assert set(MIXTURE) == set(GENERATORS) == set(CHECKS)


@pytest.mark.parametrize("task", GENERATORS)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right(task: str, held_out: bool) -> None:
    for sample in _draw(task, held_out, 400):
        assert sample.task == task
        assert sample.messages()[-1]["role"] in ("user", "tool")
        CHECKS[task](sample)


@pytest.mark.parametrize("task", GENERATORS)
def test_training_and_held_out_share_no_key(task: str) -> None:
    training = {key for sample in _draw(task, False, 600) for key in sample.keys}
    held_out = {key for sample in _draw(task, True, 200) for key in sample.keys}
    assert training
    assert held_out
    assert not training & held_out


@pytest.mark.parametrize("task", GENERATORS)
def test_keys_are_on_their_side_of_the_split(task: str) -> None:
    for sample in _draw(task, False, 300):
        # A product's key is shared by training when only its mirror image is held out.
        assert not any(is_held_out(k) for k in sample.keys if " x " not in k), sample
    for sample in _draw(task, True, 100):
        assert all(is_held_out(key) for key in sample.keys), sample


def test_products_are_held_out_in_one_order_only() -> None:
    trained = {key for sample in _draw("arithmetic", False, 6000) for key in sample.keys}
    held_out = [s for s in _draw("arithmetic", True, 300) if any(" x " in k for k in s.keys)]
    assert held_out
    for sample in held_out:
        (key,) = sample.keys
        a, b = map(int, key.removeprefix("pair:").split(" x "))
        assert key not in trained
        assert operand_key("x", b, a) in trained


def test_same_seed_gives_the_same_samples() -> None:
    first, second = (
        [training_sample(rng, Lexicon()) for _ in range(200)]
        for rng in (random.Random(3), random.Random(3))
    )
    assert first == second
    assert held_out_samples(5, "json", 20, Lexicon()) == held_out_samples(5, "json", 20, Lexicon())
    assert held_out_samples(6, "json", 20, Lexicon()) != held_out_samples(5, "json", 20, Lexicon())


def test_training_samples_are_not_all_alike() -> None:
    rng, lexicon = random.Random(0), Lexicon()
    samples = [training_sample(rng, lexicon) for _ in range(2000)]
    assert {s.task for s in samples} == set(GENERATORS)
    assert sum(s.system is not None for s in samples) > 100
    assert sum(len(s.exchanges) > 3 for s in samples) > 50


@pytest.mark.parametrize("held_out", [False, True])
def test_tools_vary(held_out: bool) -> None:
    samples = _draw("tool-choice", held_out, 400)
    names = [tool.name for sample in samples for tool in sample.tools]
    assert len(set(names)) > 0.6 * len(names)
    arguments = {key for sample in samples for tool in sample.tools for key in tool.parameters}
    assert len(arguments) > 60
    kinds = {
        kind for sample in samples for tool in sample.tools for kind in tool.parameters.values()
    }
    assert kinds == {"string", "integer", "number", "boolean"}
    places = [[t.name for t in s.tools].index(s.calls[0].name) for s in samples if s.calls]
    assert {0, 1, 2, 3} == set(places)


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_held_out_tool_names_are_never_trained(task: str) -> None:
    held_out = {tool.name for sample in _draw(task, True, 300) for tool in sample.tools}
    trained = {tool.name for sample in _draw(task, False, 3000) for tool in sample.tools}
    assert held_out
    assert not held_out & trained


def test_only_the_last_turn_of_a_sample_lacks_the_results() -> None:
    rng, lexicon = random.Random(4), Lexicon()
    samples = [s for s in (training_sample(rng, lexicon) for _ in range(3000)) if s.tools]
    assert len(samples) > 400
    for sample in samples:
        assert all(len(e.calls) == len(e.results) for e in sample.exchanges[:-1])
    assert any(sample.calls for sample in samples)
    assert any(len(sample.exchanges) == 2 for sample in samples)
