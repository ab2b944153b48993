"""Requests with images, and their answers on all ranks of a process group."""

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.distributed.comm import Communicator
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


def as_request(parts: Sequence[Part]) -> Prompt:
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        pixels, grid = picture_of(*part).numpy().tobytes(), part[1]
        digest = hashlib.sha256(pixels).digest()
        images.append(PromptImage(start=len(ids), grid=grid, digest=digest, pixels=pixels))
        ids += pad_ids(digest, grid, grid[0] * grid[1] // MERGE**2)
    return ids, tuple(images)


def answers(comm: Communicator, path: str) -> list[list[int]]:
    """Return the tokens of all prompts, computed by the scheduler of this rank.

    All ranks get the same messages in the same order, but only rank 0 gets pixels and encodes.
    """
    engine = make_engine(path, comm, tp_size=comm.tp.size, page_size=16, **SMALL)
    runner, encodes = engine._launcher.runner, comm.tp.rank == 0
    assert (runner.images is not None, runner.model.encoder is not None) == (encodes, encodes)
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
        if not encodes:
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
