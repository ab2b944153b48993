"""Answers of Gemma 3 to prompts with images are those of transformers, for any split into steps.

Hits inside images, chunks smaller than an image, preemption, a small image buffer and two ranks.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minisgl.core.batch import WindowLayers
from tests.parity import test_scheduler_parity
from tests.parity.gemma3_models import BEGIN, END, IMAGE, SIDE, logits_of, picture, save
from tests.parity.image_requests import (
    SAMPLING,
    TOKENS,
    PixelsOf,
    Prompt,
    answers,
    request_of,
)
from tests.parity.models import greedy_tokens
from tests.parity.test_scheduler_parity import UNLIMITED, Case, Recorder, prove, run
from tests.unit.distributed.ranks import run_ranks

COUNT = 16  # tokens of an image
SMALL = {"image_cache_tokens": 3 * COUNT}  # room for three images
Part = int | tuple[int]  # an id, or the seed of an image


def prompts() -> list[list[Part]]:
    """Most share a beginning. Images end at tokens that are no multiple of a page."""
    text = np.random.default_rng(3).integers(3, 130, 100).tolist()

    def image(seed: int) -> list[Part]:
        return [BEGIN, (seed,), END]

    return [
        [*text[:29], *image(0), *text[30:50]],
        [*text[:29], *image(0), *text[60:63]],
        [*text[:29], *image(1), *text[30:44]],
        [*image(2), *text[:15], *image(0), *image(2), *text[:12], *image(4), 5],
        [*text[:33]],
    ]


def as_request(parts: list[Part]) -> Prompt:
    def image(part: Part) -> PixelsOf:
        assert isinstance(part, tuple)
        return PixelsOf(picture(*part), (SIDE, SIDE), COUNT)

    return request_of(parts, image)


@cache
def saved(name: str, folder: Path) -> tuple[Any, str, list[list[int]]]:
    """Return a model, its path, and the known tokens after each prompt."""
    return *save(name, folder), [[] for _ in prompts()]


def expected(name: str, folder: Path, guesses: list[list[int]]) -> list[list[int]]:
    """Return the tokens of transformers' greedy decoding. guesses: as in transformers_greedy."""
    model, _, known = saved(name, folder)
    found = []
    for parts, tokens, guess in zip(prompts(), known, guesses, strict=False):
        ids = [IMAGE if token < 0 else token for token in as_request(parts)[0]]
        seeds = [part[0] for part in parts if isinstance(part, tuple)]
        logits = partial(logits_of, model, seeds=seeds)
        found.append(greedy_tokens(logits, ids, TOKENS, tokens, guess))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("models"))


CASES = [
    ("window-20", Case(1, "naive", overlap=False, crowded=False)),
    ("window-9", Case(7, "radix", overlap=True, crowded=False, page_size=16)),
    ("window-20", Case(64, "radix", overlap=True, crowded=True, page_size=1)),
    ("window-20", Case(UNLIMITED, "radix", overlap=False, crowded=False, page_size=8)),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_answers_equal_those_of_transformers(name: str, case: Case, folder: Path) -> None:
    """A crowded run has the window pages of three requests with images."""
    path = saved(name, folder)[1]
    requests = [as_request(parts) for parts in prompts()]
    given = [ids for ids, _ in requests], [images for _, images in requests]
    reserve = WindowLayers(20, 0).reserve(case.page_size, COUNT)
    with patch.object(test_scheduler_parity, "few_window_pages", lambda *_: 3 * reserve):
        outputs, scheduler, recorder = run(path, case, [SAMPLING], None, None, *given, **SMALL)
    assert outputs == expected(name, folder, outputs) * case.waves
    if case.chunk < UNLIMITED:  # else the buffer of images divides prompts
        prove(case, scheduler, recorder)
    check_spans(recorder, case)


def check_spans(recorder: Recorder, case: Case) -> None:
    """No chunk ends within an image. With pages of several cached tokens, some begin within one.

    A token of an image stands as a negative id in a chunk.
    """
    spans = [span for batch in recorder.batches for span in batch.spans]
    assert {span.end - span.first for span in spans} <= {*range(1, COUNT + 1)}
    assert all(
        (batch.chunk_ids < 0).sum() == sum(s.end - s.first for s in batch.spans)
        for batch in recorder.batches
    )
    partial = [span for span in spans if span.end - span.first < COUNT]
    assert bool(partial) == (case.cache_type == "radix" and case.page_size > 1)


def test_two_ranks_give_the_answers_of_one(folder: Path, tmp_path: Path) -> None:
    path = saved("window-20", folder)[1]
    requests = [as_request(parts) for parts in prompts()]
    found = run_ranks(2, tmp_path, answers, path, requests, SMALL)
    assert found == [expected("window-20", folder, found[0])] * 2
