"""Requests with images, and their answers on all ranks of a process group."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.distributed.comm import Communicator
from minisgl.engine import Engine
from minisgl.images.pads import pad_ids
from minisgl.message.messages import AddReq, PromptImage, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.image_models import MERGE, picture

TOKENS = 12
SMALL = {"image_cache_tokens": 36}  # an image has at most a third of them
SAMPLING = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
Part = int | tuple[int, tuple[int, int]]
Prompt = tuple[list[int], tuple[PromptImage, ...]]
P = TypeVar("P")


class PixelsOf(NamedTuple):
    """An image: its pixels, its grid of patches, and the number of its tokens."""

    pixels: Tensor
    grid: tuple[int, int]
    tokens: int


def picture_of(seed: int, grid: tuple[int, int]) -> Tensor:
    """Return pixels; those of seed 1 differ from those of seed 0 in one pixel."""
    pixels = picture(*grid, seed=seed // 2)
    pixels[0, 0, 0] ^= seed % 2
    return pixels


def prompts() -> list[list[Part]]:
    """Prompts with images of 6 to 12 tokens: seeds and grids. Most share a beginning."""
    text = np.random.default_rng(3).integers(3, 130, 100).tolist()
    wide, high = (4, 6), (8, 6)
    return [
        [*text[:30], (0, high), *text[30:60]],
        [*text[:30], (0, high), *text[60:63]],
        [*text[:30], (1, high), *text[30:60]],
        [(2, wide), *text[:15], (0, high), 5, (2, wide), *text[:25], (4, high), 5],
        [*text[:33]],
    ]


def request_of(parts: Sequence[P], image: Callable[[P], PixelsOf]) -> Prompt:
    """Return the ids and images of a prompt. image: gives those of a part that is no id."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        pixels, grid, count = image(part)
        data = pixels.numpy().tobytes()
        digest = hashlib.sha256(data).digest()
        images.append(PromptImage(start=len(ids), grid=grid, digest=digest, pixels=data))
        ids += pad_ids(digest, grid, count)
    return ids, tuple(images)


def as_request(parts: Sequence[Part]) -> Prompt:
    def image(part: Part) -> PixelsOf:
        assert isinstance(part, tuple)
        height, width = part[1]
        return PixelsOf(picture_of(*part), part[1], height * width // MERGE**2)

    return request_of(parts, image)


def scheduler_of(
    engine: Engine, inbox: LocalInbox, send: Callable[[StepOutput], object]
) -> Scheduler:
    """Return a scheduler whose steps have at most 16 prompt tokens."""
    return Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None, prefill_budget_tokens=16),
        vocab_size=engine.facts().vocab_size,
        eos_token_ids=engine.facts().eos_token_ids,
        inbox=inbox,
        send=send,
        extensions=engine.extensions,
    )


def answers(
    comm: Communicator, path: str, requests: list[Prompt], settings: dict[str, int]
) -> list[list[int]]:
    """Return the tokens of all requests, computed by the scheduler of this rank.

    All ranks get the same messages in the same order, but only rank 0 gets pixels and encodes.
    """
    engine = make_engine(path, comm, tp_size=comm.tp.size, page_size=16, **settings)
    runner, encodes = engine._launcher.runner, comm.tp.rank == 0
    assert (runner.images is not None, runner.model.encoder is not None) == (encodes, encodes)
    inbox, outbox = LocalInbox(), deque[StepOutput]()
    scheduler = scheduler_of(engine, inbox, outbox.append)
    for uid, (ids, images) in enumerate(requests):
        if not encodes:
            images = tuple(image.without_pixels() for image in images)
        tokens = np.array(ids, dtype="<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=tokens, sampling=SAMPLING, images=images))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    engine.close()
    found: list[list[int]] = [[] for _ in requests]
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            found[uid].append(token)
    return found
