"""Answers of Gemma 3 to prompts with images are those of transformers, for any split into steps.

Hits inside images, chunks smaller than an image, preemption, a small image buffer and two ranks.
"""

import hashlib
from collections import deque
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import WindowLayers
from minisgl.distributed.comm import Communicator
from minisgl.images.pads import pad_ids
from minisgl.message.messages import AddReq, PromptImage, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity import test_scheduler_parity
from tests.parity.driver import make_engine
from tests.parity.gemma3_models import BEGIN, END, IMAGE, SIDE, logits_of, picture, save
from tests.parity.test_scheduler_parity import UNLIMITED, Case, Recorder, prove, run
from tests.unit.distributed.ranks import run_ranks

TOKENS = 12
COUNT = 16  # tokens of an image
SMALL = {"image_cache_tokens": 3 * COUNT}  # room for three images
SAMPLING = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
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


def as_request(parts: list[Part]) -> tuple[list[int], tuple[PromptImage, ...]]:
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        pixels, grid = picture(*part).numpy().tobytes(), (SIDE, SIDE)
        digest = hashlib.sha256(pixels).digest()
        images.append(PromptImage(start=len(ids), grid=grid, digest=digest, pixels=pixels))
        ids += pad_ids(digest, grid, COUNT)
    return ids, tuple(images)


@cache
def expected(name: str, folder: Path) -> tuple[str, list[list[int]]]:
    """Return the folder of the model, and the tokens of transformers' greedy decoding."""
    model, path = save(name, folder)
    found = []
    for parts in prompts():
        ids, _ = as_request(parts)
        ids = [IMAGE if token < 0 else token for token in ids]
        seeds = [part[0] for part in parts if isinstance(part, tuple)]
        for _ in range(TOKENS):
            ids.append(int(logits_of(model, ids, seeds)[-1].argmax()))
        found.append(ids[-TOKENS:])
    return path, found


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
    path, wanted = expected(name, folder)
    requests = [as_request(parts) for parts in prompts()]
    given = [ids for ids, _ in requests], [images for _, images in requests]
    reserve = WindowLayers(20, 0).reserve(case.page_size, COUNT)
    with patch.object(test_scheduler_parity, "few_window_pages", lambda *_: 3 * reserve):
        outputs, scheduler, recorder = run(path, case, [SAMPLING], None, None, *given, **SMALL)
    assert outputs == wanted * case.waves
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


def answers(comm: Communicator, path: str) -> list[list[int]]:
    """Return the tokens of all prompts, computed by the scheduler of this rank."""
    engine = make_engine(path, comm, tp_size=comm.tp.size, page_size=16, **SMALL)
    inbox, outbox = LocalInbox(), deque[StepOutput]()
    scheduler = Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None, prefill_budget_tokens=16),
        vocab_size=engine.facts().vocab_size,
        eos_token_ids=engine.facts().eos_token_ids,
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    for uid, parts in enumerate(prompts()):
        ids, images = as_request(parts)
        if comm.tp.rank:
            images = tuple(image.without_pixels() for image in images)
        tokens = np.array(ids, dtype="<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=tokens, sampling=SAMPLING, images=images))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    engine.close()
    found: list[list[int]] = [[] for _ in prompts()]
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            found[uid].append(token)
    return found


def test_two_ranks_give_the_answers_of_one(folder: Path, tmp_path: Path) -> None:
    path, wanted = expected("window-20", folder)
    assert run_ranks(2, tmp_path, answers, path) == [wanted] * 2
