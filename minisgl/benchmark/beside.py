"""Streams that run beside a load, and the gaps between tokens that they felt meanwhile.

The load begins when every stream has its first token, so that their own prompts are not in the
figures; when it has been answered the streams are given up.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.latency import Samples, describe
from minisgl.benchmark.trace import Load
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError

_LOOK_EVERY_S = 0.005


def streams_of(options: argparse.Namespace) -> Load:
    """The streams that --beside COUNT PROMPT OUTPUT asks for. Raises ConfigError."""
    count, prompt, output = options.beside or (0, 1, 1)
    if min(count + 1, prompt, output) < 1:
        raise ConfigError("--beside takes a number of streams and two positive numbers of tokens")
    seed, largest = options.seed + 1_000_003, options.largest_id  # shares nothing with the load
    made = make_workload(count, (prompt, prompt), (output, output), 0, seed, largest)
    prompts = [np.array(ids, dtype=np.int32) for ids in made.prompts]
    return Load(prompts, made.max_tokens, [0.0] * count)


@contextlib.asynccontextmanager
async def running(client: StreamingClient, bodies: Sequence[bytes]) -> AsyncIterator[list[Answer]]:
    """Answers that grow, each with its first output or an error; given up on the way out."""
    answers = [Answer(0.0) for _ in bodies]
    tasks = [
        asyncio.create_task(client.post(body, answer))
        for body, answer in zip(bodies, answers, strict=True)
    ]
    try:
        while not all(answer.outputs_s or answer.error for answer in answers):
            await asyncio.sleep(_LOOK_EVERY_S)
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def summarise_streams(
    asked: Load, streams: Sequence[Answer], load: Sequence[Answer]
) -> dict[str, Any]:
    """Their gaps while the load was under way, and their mean context when it began and ended.

    A gap counts by its second output. failed: streams with an error, and such that came to their
    end before the load did: with fewer of them it is another measurement.
    """
    begin_s = min(answer.sent_s for answer in load)
    end_s = max(at_s for answer in load for at_s in answer.outputs_s or [answer.sent_s])
    gaps: list[Samples] = [np.empty(0)]
    contexts: list[list[int]] = []
    failed = 0
    for prompt, most, stream in zip(asked.prompts, asked.max_tokens, streams, strict=True):
        outputs_s = np.array(stream.outputs_s)
        first, end = np.searchsorted(outputs_s, [begin_s, end_s], side="right").tolist()
        gaps.append(np.diff(outputs_s[max(first - 1, 0) : end]))
        contexts.append([len(prompt) + first, len(prompt) + end])
        ended = stream.output_tokens >= most and stream.outputs_s[-1] < end_s
        failed += ended or stream.error is not None
    return {
        "streams": len(streams),
        "failed": failed,
        "context_tokens": np.mean(contexts, axis=0).tolist(),
        "itl_s": describe(np.concatenate(gaps)),
    }
