"""Steps that belong to no request: to warm an engine up and to learn what a step costs.

They run before any request. What they write goes to the dummy page; the contexts that they read
lie all over the pool, as those of requests will.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minisgl.core import Batch, EngineLike, Int32Array, SamplingArrays, StepCost, StepExtras

_TIME_LIMIT_NS = 3 * 10**9  # for all of a calibration; slow machines stop at smaller sizes
_REPEATS = 3
_LONGEST_STEP_S = 0.15  # predicted; larger shapes are for machines that take them in their stride


class Shape(NamedTuple):
    """num_decode reqs with `context` tokens each, and `chunk` prompt tokens after `context` cached
    ones, cut into several prompts where one would be too long."""

    num_decode: int
    chunk: int
    context: int


class Timing(NamedTuple):
    """What StepCost predicts from, and what a step took."""

    tokens: int
    decode_keys: int
    prefill_pairs: int
    seconds: float


def warm_up(engine: EngineLike, dummy_page: int) -> None:
    """One decode, one prefill and one mixed step, with every kind of sampling."""
    for shape in (Shape(0, 4, 0), Shape(1, 0, 4), Shape(2, 3, 4)):
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
            for edited in (False, True):
                batch = probe_batch(
                    engine, dummy_page, shape, temperature=temperature, top_k=top_k, edited=edited
                )
                if batch is not None:
                    engine.launch(batch).wait()


def every_size(engine: EngineLike, dummy_page: int, max_chunk_tokens: int) -> None:
    """Decode steps of every number of reqs, and chunks of many lengths."""
    shapes = [Shape(reqs, 0, 4) for reqs in range(1, engine.max_running_reqs + 1)]
    for power in range(max_chunk_tokens.bit_length()):
        shapes += [Shape(0, 2**power, 0), Shape(0, 2**power + 1, 0), Shape(1, 2**power, 4)]
    for shape in shapes:
        batch = probe_batch(engine, dummy_page, shape, temperature=1.0, top_k=2)
        if batch is not None and shape.chunk <= max_chunk_tokens:
            engine.launch(batch).wait()


def largest_step(engine: EngineLike, dummy_page: int, max_chunk_tokens: int) -> None:
    """The step that takes the most memory: all rows in use, the longest chunk, all samplers."""
    chunks = -(-max_chunk_tokens // engine.max_seq_len)
    num_decode = max(engine.max_running_reqs - chunks, 0)
    most = (engine.max_running_reqs - num_decode) * engine.max_seq_len
    shape = Shape(num_decode, min(max_chunk_tokens, most), 0)
    batch = probe_batch(engine, dummy_page, shape, temperature=1.0, top_k=2)
    assert batch is not None, "the largest step fits by construction: this is a bug"
    engine.launch(batch).wait()


def calibrate(
    engine: EngineLike,
    dummy_page: int,
    max_chunk_tokens: int,
    slowest_ns: Callable[[int], int],
) -> StepCost:
    """Time growing steps, smallest first, until the time is up or a step would take long.

    slowest_ns(own) is the largest duration of all ranks. Only such agreed durations are used, so
    every rank runs the same steps (they hold collectives) and returns the same cost.
    """
    timings: list[Timing] = []
    longest = min(engine.max_seq_len - 1, 2048)
    half = longest // 2
    shapes = [Shape(1, 0, 1), Shape(0, 16, 0), Shape(8, 0, 1), Shape(8, 0, half)]
    shapes += [Shape(0, 128, 0), Shape(32, 0, half), Shape(0, 512, 0), Shape(1, 512, 256)]
    shapes += [Shape(128, 0, half), Shape(0, 2048, 0), Shape(64, 1024, half)]
    shapes += [Shape(0, 512, 8 * half), Shape(0, 4096, 0), Shape(0, 8192, 0)]
    spent_ns = 0
    for shape in shapes:
        if len(timings) > 3 and spent_ns > _TIME_LIMIT_NS:
            break
        batch = probe_batch(engine, dummy_page, shape)
        if batch is None or shape.chunk > max_chunk_tokens:
            continue
        work = _work(batch)
        if len(timings) > 5 and fit(timings).predict_s(*work) > _LONGEST_STEP_S:
            break
        durations_ns: list[int] = []
        while not durations_ns or (len(durations_ns) < _REPEATS and spent_ns <= _TIME_LIMIT_NS):
            begin = time.perf_counter_ns()
            engine.launch(batch).wait()
            durations_ns.append(slowest_ns(time.perf_counter_ns() - begin))
            spent_ns += durations_ns[-1]
            none = batch.page_ids[:0]  # they are there now; real steps bring few
            batch = replace(batch, page_rows=none, page_cols=none, page_ids=none)
        timings.append(Timing(*work, min(durations_ns) / 1e9))
    return fit(timings)


def _work(batch: Batch) -> tuple[int, int, int]:
    """Tokens, decode keys and prefill pairs, as in StepCost."""
    lengths = batch.lengths.astype(np.int64)
    keys = lengths * batch.start + lengths * (lengths + 1) // 2
    n = batch.num_decode
    return int(lengths.sum()), int(keys[:n].sum()), int(keys[n:].sum())


def fit(timings: list[Timing]) -> StepCost:
    """Least squares of the relative error, with no negative term.

    A term that comes out negative is noise around zero: it is dropped and the rest fitted again.
    """
    seconds = np.array([t.seconds for t in timings])
    terms = np.array([[1.0, *t[:3]] for t in timings]) / seconds[:, None]
    used = [0, 1, 2, 3]
    while True:
        solution = np.linalg.lstsq(terms[:, used], np.ones(len(timings)), rcond=None)[0]
        if len(used) == 1 or solution.min() >= 0:
            break
        used.pop(int(solution.argmin()))
    cost = np.zeros(4)
    cost[used] = np.maximum(solution, 0.0)
    return StepCost(**dict(zip(StepCost.__struct_fields__, cost.tolist(), strict=True)))


def probe_batch(
    engine: EngineLike,
    dummy_page: int,
    shape: Shape,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    edited: bool = False,
) -> Batch | None:
    """A batch of that shape, or None where the engine has too few rows or too short a context.

    edited: sampled as a batch in which some req edits its logits or asks for log-probabilities.
    """
    longest = max(engine.max_seq_len - shape.context, 1)
    num_chunks = -(-shape.chunk // longest)
    num_reqs = shape.num_decode + num_chunks
    if num_reqs > engine.max_running_reqs or shape.context >= engine.max_seq_len:
        return None
    lengths = np.ones(num_reqs, dtype=np.int32)
    lengths[shape.num_decode :] = longest
    if num_chunks:
        lengths[-1] = shape.chunk - (num_chunks - 1) * longest
    pages = -(-(shape.context + int(lengths.max())) // engine.page_size)
    read_only = shape.context // engine.page_size
    page_ids = np.full((num_reqs, pages), dummy_page, dtype=np.int32)
    scattered = np.arange(num_reqs * read_only, dtype=np.int32) % engine.num_pages
    page_ids[:, :read_only] = scattered.reshape(num_reqs, read_only)
    rows = np.arange(num_reqs, dtype=np.int32)
    none = np.full(num_reqs, -1, dtype=np.int32)
    return Batch(
        step_id=0,
        num_decode=shape.num_decode,
        rows=rows,
        start=np.full(num_reqs, shape.context, dtype=np.int32),
        lengths=lengths,
        samples=np.ones(num_reqs, dtype=np.bool_),
        chunk_ids=np.zeros(shape.chunk, dtype=np.int32),
        page_rows=np.repeat(rows, pages),
        page_cols=np.tile(np.arange(pages, dtype=np.int32), num_reqs),
        page_ids=page_ids.ravel(),
        sampling=_sampling(num_reqs, temperature, top_k),
        extras=StepExtras(None, none, none, none[:0]) if edited else None,
    )


def _sampling(num_reqs: int, temperature: float, top_k: int) -> SamplingArrays:
    def filled(value: float) -> np.ndarray:
        return np.full(num_reqs, value, dtype=np.float32)

    ks: Int32Array = np.full(num_reqs, top_k, dtype=np.int32)
    seeds = np.zeros(num_reqs, dtype=np.int64)
    return SamplingArrays(filled(temperature), ks, filled(1.0), filled(0.0), seeds)
