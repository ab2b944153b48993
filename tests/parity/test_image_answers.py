"""Answers to prompts with images are those of transformers, for any split into steps.

Chunks through images, preemption, hits inside images, drafts, ranks and a small image buffer.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from sys import getrefcount
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl.message.messages import AddReq
from minisgl.scheduler import LocalInbox
from tests.parity.driver import make_engine
from tests.parity.image_models import IMAGE, add_draft_head, processed, save
from tests.parity.image_requests import (
    SAMPLING,
    SMALL,
    TOKENS,
    Part,
    answers,
    as_request,
    picture_of,
    prompts,
    scheduler_of,
)
from tests.parity.models import greedy_tokens
from tests.parity.test_scheduler_parity import UNLIMITED, Case, prove, run
from tests.unit.distributed.ranks import run_ranks
from tests.unit.scheduler.drafts import ChangingDrafts


def greedy(model: Any, parts: Sequence[Part], known: list[int], guess: Sequence[int]) -> list[int]:
    """Return the tokens of transformers' greedy decoding. known, guess: as in greedy_tokens."""
    ids, images = as_request(parts)
    ids = [IMAGE if token < 0 else token for token in ids]
    pictures = [picture_of(*part) for part in parts if not isinstance(part, int)]
    given = processed(pictures) if images else {}

    @torch.inference_mode()
    def logits_of(ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE).int()
        logits: torch.Tensor = model(input_ids=tokens, mm_token_type_ids=kinds, **given).logits[0]
        return logits

    return greedy_tokens(logits_of, ids, TOKENS, known, guess)


@cache
def saved(name: str, folder: Path) -> tuple[Any, str, list[list[int]]]:
    """Return a model, its path, and the known tokens after each prompt."""
    return *save(name, folder), [[] for _ in prompts()]


def expected(
    name: str, folder: Path, guesses: Iterable[Sequence[int]] = repeat(())
) -> list[list[int]]:
    """Return the tokens of transformers after the prompts."""
    model, _, known = saved(name, folder)
    return [greedy(model, *each) for each in zip(prompts(), known, guesses, strict=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("models"))


CASES = [
    ("qwen3_5", Case(16, "radix", overlap=True, crowded=False, page_size=16)),
    ("qwen3_5_moe", Case(UNLIMITED, "radix", overlap=True, crowded=False, page_size=16)),
    ("qwen3-vl", Case(1, "naive", overlap=False, crowded=False)),
    ("qwen3-vl", Case(7, "radix", overlap=True, crowded=True, page_size=2)),
    ("qwen3-vl", Case(64, "radix", overlap=False, crowded=False, page_size=16)),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_answers_equal_those_of_transformers(name: str, case: Case, folder: Path) -> None:
    """The buffer has room for three of the images, so that others replace them."""
    path = saved(name, folder)[1]
    requests = [as_request(parts) for parts in prompts()]
    given = [ids for ids, _ in requests], [images for _, images in requests]
    outputs, scheduler, recorder = run(path, case, [SAMPLING], None, None, *given, **SMALL)
    assert outputs == expected(name, folder, outputs) * case.waves
    assert scheduler.stats().images.encoded >= 4, "the buffer is too small for all images"
    divided = {image.first > 0 for batch in recorder.batches for image in batch.images}
    assert True in divided or case.chunk > 1
    if name == "qwen3-vl":  # prompts of a hybrid model are cached from 64 tokens on
        prove(case, scheduler, recorder)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3-vl"])
def test_drafts_do_not_change_answers_to_images(name: str, folder: Path) -> None:
    path, wanted = saved(name, folder)[1], expected(name, folder)
    requests = [as_request(parts) for parts in prompts()]
    given = [ids for ids, _ in requests], [images for _, images in requests]
    drafts = ChangingDrafts(7)
    case = Case(UNLIMITED, "radix", overlap=True, crowded=False, page_size=16)
    outputs, _, recorder = run(path, case, [SAMPLING], drafts, wanted * 2, *given, **SMALL)
    assert outputs == wanted * 2
    assert recorder.predicted > 0


def test_drafts_of_a_head_do_not_change_answers_to_images(tmp_path: Path) -> None:
    model, path = save("qwen3_5", tmp_path)
    add_draft_head(model, path)
    requests = [as_request(parts) for parts in prompts()]
    given = [ids for ids, _ in requests], [images for _, images in requests]
    found = []
    for drafts, method in ((None, None), (ChangingDrafts(3, head=True), "mtp")):
        case = Case(32, "radix", overlap=True, crowded=False, page_size=16, speculative=method)
        outputs, scheduler, _ = run(path, case, [SAMPLING], drafts, None, *given, **SMALL)
        found.append(outputs)
    assert found[0] == found[1]
    drafts_of = scheduler.stats().drafts
    assert sum(drafts_of.accepted) > sum(drafts_of.drafted) / 2 > 0, drafts_of


def test_an_idle_engine_keeps_no_pixels(folder: Path) -> None:
    """Regression: an engine refers to its last step, which had the pixels of its images."""
    engine = make_engine(save("qwen3-vl", folder)[1], page_size=16, **SMALL)
    inbox = LocalInbox()
    scheduler = scheduler_of(engine, inbox, lambda _: None)
    ids, (image,) = as_request([(0, (8, 6)), 5])
    held = getrefcount(image.pixels)
    one = msgspec.structs.replace(SAMPLING, max_tokens=1)
    tokens = np.array(ids, dtype="<i4").tobytes()
    inbox.messages.append(AddReq(uid=0, token_ids=tokens, sampling=one, images=(image,)))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    assert scheduler.stats().images.encoded == 1
    left = getrefcount(image.pixels)  # outside of the assertion, which keeps references
    assert left == held


def test_two_ranks_give_the_answers_of_one(folder: Path, tmp_path: Path) -> None:
    path = saved("qwen3-vl", folder)[1]
    requests = [as_request(parts) for parts in prompts()]
    found = run_ranks(2, tmp_path, answers, path, requests, SMALL)
    assert found == [expected("qwen3-vl", folder, found[0])] * 2
