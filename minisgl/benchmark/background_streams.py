"""Background streams: long streams that run during a load, and their inter-token latency.

The load starts when every stream has its first token, so the streams' own prompts are not part of
the measurement. When all requests of the load have ended, the streams are aborted.
"""

import argparse
import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.latency import Samples, describe
from minisgl.benchmark.trace import Load
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError

_POLL_S = 0.005


def background_load(options: argparse.Namespace) -> Load:
    """Return the requests of --beside STREAMS PROMPT OUTPUT. Raises ConfigError."""
    count, prompt, output = options.beside or (0, 1, 1)
    if min(count + 1, prompt, output) < 1:
        raise ConfigError("--beside takes a number of streams and two positive numbers of tokens")
    seed = options.seed + 1_000_003  # not the seed of the load, so that no prefix is shared
    load = make_workload(count, (prompt, prompt), (output, output), 0, seed, options.largest_id)
    return load._replace(arrivals_s=[0.0] * count)


@contextlib.asynccontextmanager
async def background_streams(
    client: StreamingClient, bodies: Sequence[bytes]
) -> AsyncIterator[list[Answer]]:
    """Run one stream for each body, until the `async with` block ends.

    Yields one answer for each stream. Each already has its first output or an error; later outputs
    are added while the block runs. No garbage collection runs until the end of the block, because
    it would add to the latencies.
    """
    answers = [Answer(0.0) for _ in bodies]
    gc.collect()
    gc.disable()
    tasks = [
        asyncio.create_task(client.post(body, answer))
        for body, answer in zip(bodies, answers, strict=True)
    ]
    try:
        while not all(answer.outputs_s or answer.error for answer in answers):
            await asyncio.sleep(_POLL_S)
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gc.enable()


def summarise_streams(
    background: Load, streams: Sequence[Answer], load: Sequence[Answer]
) -> dict[str, Any]:
    """Summarise the streams during the load: inter-token latencies, and mean contexts.

    background: the requests of the streams. streams: the answers of the streams. load: the answers
    of the load. context_tokens: the mean contexts at the start and at the end of the load. A gap
    between two tokens counts if the second token arrives during the load. failed: the number of
    streams that have an error or ended before the load, so that it ran with fewer streams.
    """
    begin_s = min(answer.sent_s for answer in load)
    end_s = max(at_s for answer in load for at_s in answer.outputs_s or [answer.sent_s])
    gaps: list[Samples] = [np.empty(0)]
    contexts: list[list[int]] = []
    failed = 0
    for prompt, max_tokens, stream in zip(
        background.prompts, background.max_tokens, streams, strict=True
    ):
        outputs_s = np.array(stream.outputs_s)
        first, end = np.searchsorted(outputs_s, [begin_s, end_s], side="right").tolist()
        gaps.append(np.diff(outputs_s[max(first - 1, 0) : end]))
        contexts.append([len(prompt) + first, len(prompt) + end])
        ended = stream.output_tokens >= max_tokens and stream.outputs_s[-1] < end_s
        failed += ended or stream.error is not None
    return {
        "streams": len(streams),
        "failed": failed,
        "context_tokens": np.mean(contexts, axis=0).tolist(),
        "itl_s": describe(np.concatenate(gaps)),
    }
