"""Steps that belong to no request: to warm an engine up and to learn what a step costs.

They run before any request. What they write goes to the dummy page; the contexts that they read
lie all over the pool, as those of requests will.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minisgl.core import Batch, EngineLike, Int32Array, SamplingArrays, StepCost, StepExtras

_TIME_LIMIT_NS = 3 * 10**9  # for all of a calibration; slow machines stop at smaller sizes
_REPEATS, _MOST_REPEATS = 3, 9
_SETTLED_NS = 60 * 10**6  # of a shape with prompt tokens: a chip's clock follows its power slowly
_HEAT_S = 0.3  # of steps with prompt tokens, before those of more than a few are timed
_SCATTER = 1.1  # within which two durations say the same
_LONGEST_STEP_S = 0.06  # predicted; larger shapes are for machines that take them in their stride


class StepShape(NamedTuple):
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
    for shape in (StepShape(0, 4, 0), StepShape(1, 0, 4), StepShape(2, 3, 4)):
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
            for edited in (False, True):
                batch = probe_batch(
                    engine, dummy_page, shape, temperature=temperature, top_k=top_k, edited=edited
                )
                if batch is not None:
                    engine.launch(batch).wait()


def every_size(engine: EngineLike, dummy_page: int, max_chunk_tokens: int) -> None:
    """Decode steps of every number of reqs, and chunks of many lengths."""
    shapes = [StepShape(reqs, 0, 4) for reqs in range(1, engine.max_running_reqs + 1)]
    for power in range(max_chunk_tokens.bit_length()):
        shapes += [
            StepShape(0, 2**power, 0),
            StepShape(0, 2**power + 1, 0),
            StepShape(1, 2**power, 4),
        ]
    for shape in shapes:
        batch = probe_batch(engine, dummy_page, shape, temperature=1.0, top_k=2)
        if batch is not None and shape.chunk <= max_chunk_tokens:
            engine.launch(batch).wait()


def largest_step(engine: EngineLike, dummy_page: int, max_chunk_tokens: int) -> None:
    """The step that takes the most memory: all rows in use, the longest chunk, all samplers."""
    chunks = -(-max_chunk_tokens // engine.max_seq_len)
    num_decode = max(engine.max_running_reqs - chunks, 0)
    most = (engine.max_running_reqs - num_decode) * engine.max_seq_len
    shape = StepShape(num_decode, min(max_chunk_tokens, most), 0)
    batch = probe_batch(engine, dummy_page, shape, temperature=1.0, top_k=2)
    assert batch is not None, "the largest step fits by construction: this is a bug"
    engine.launch(batch).wait()


def calibrate(
    engine: EngineLike,
    dummy_page: int,
    max_chunk_tokens: int,
    vocab_size: int,
    slowest_ns: Callable[[int], int],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> StepCost:
    """Time growing steps, smallest first, until the time is up or a step would take long.

    At its power limit a GPU takes longer for what differs than for zeros, and longer than rested:
    5 % together (8B, H200). So ids differ, and larger steps are timed behind more of their kind.

    slowest_ns(own) is the largest duration of all ranks. Only such agreed durations are used, so
    every rank runs the same steps (they hold collectives) and returns the same cost. A shape whose
    durations do not settle, on a machine that does other work, is left out.
    """
    timings: list[Timing] = []
    watch, hot = _StopWatch(engine, slowest_ns, clock_ns), False
    for shape in _shapes(engine.max_running_reqs, engine.max_seq_len):
        known = len(timings) > 1
        if known and watch.expired:
            break
        batch = probe_batch(engine, dummy_page, shape, num_ids=vocab_size)
        if batch is None or shape.chunk > max_chunk_tokens:
            continue
        work = _work(batch)
        predicted_s = fit(timings).predict_s(*work) if known else 0.0
        if predicted_s > _LONGEST_STEP_S:
            continue
        if known and shape.chunk and not hot:
            watch.durations_ns(batch, int(_HEAT_S / predicted_s))
            hot = True
        found_ns = watch.middle_ns(batch, _SETTLED_NS if shape.chunk else 0, surely=not known)
        if found_ns is not None:
            timings.append(Timing(*work, found_ns / 1e9))
    return fit(timings)


@dataclass(slots=True)
class _StopWatch:
    """Times steps, as `calibrate` is told to, and knows how much of its time is spent."""

    _engine: EngineLike
    _slowest_ns: Callable[[int], int]
    _clock_ns: Callable[[], int]
    _spent_ns: int = 0

    @property
    def expired(self) -> bool:
        return self._spent_ns > _TIME_LIMIT_NS

    def middle_ns(self, batch: Batch, least_ns: int, surely: bool) -> int | None:
        """What such a step takes, once its durations come to least_ns and agree; None if they do
        not, or, where something must be said, the least: a pause only adds."""
        durations_ns: list[int] = []
        middle_ns = None
        while len(durations_ns) < _MOST_REPEATS and (
            middle_ns is None or sum(durations_ns) < least_ns
        ):
            durations_ns += self.durations_ns(batch, _REPEATS)
            middle_ns = _middle(durations_ns)
            if self.expired:
                break
        return min(durations_ns) if surely and middle_ns is None else middle_ns

    def durations_ns(self, batch: Batch, repeats: int) -> list[int]:
        """From the end of a step to that of the next, which was launched meanwhile, as in serving;
        of the slowest rank."""
        ends_ns: list[int] = []
        running = self._engine.launch(batch)
        none = batch.page_ids[:0]  # they are there now; real steps bring few
        batch = replace(batch, page_rows=none, page_cols=none, page_ids=none)
        for _ in range(repeats + 1):
            following = self._engine.launch(batch)
            running.wait()
            ends_ns.append(self._clock_ns())
            running = following
        running.wait()
        own_ns = [after - before for before, after in itertools.pairwise(ends_ns)]
        agreed_ns = [*map(self._slowest_ns, own_ns)]
        self._spent_ns += sum(agreed_ns)
        return agreed_ns


def _shapes(rows: int, max_seq_len: int) -> list[StepShape]:
    """In about the order of their time. Some come again with a context, or with a longer one.

    Small ones only decode, up to all rows; the others hold a decode req beside a chunk. Large ones
    lie behind a context, as most that a price is asked for: a prompt's first tokens take less.
    """
    half, far = min(max_seq_len - 1, 2048) // 2, min(max_seq_len * 3 // 4, 8192)
    shapes = [StepShape(1, 0, 1), StepShape(1, 15, 1)]
    for reqs in (8, 32, 64, 128):
        decode = [StepShape(reqs, 0, 1), StepShape(reqs, 0, half)]
        shapes += decode if reqs <= rows else [StepShape(1, reqs - 1, 1)]
    shapes += [StepShape(1, size - 1, half) for size in (256, 384, 512, 640, 768)]
    shapes.append(StepShape(1, 511, far))
    return shapes + [StepShape(1, size - 1, half) for size in (1024, 2048, 4096, 8192)]


def _middle(durations_ns: list[int]) -> int | None:
    """Their median, if one beside it says the same; None where they scatter, or there are few.

    Not the least: a host that sees one end late finds the next step too short.
    """
    ranked, middle = sorted(durations_ns), (len(durations_ns) - 1) // 2
    if len(ranked) < 3:
        return None
    low, found, high = ranked[middle - 1 : middle + 2]
    return found if high <= _SCATTER * found or found <= _SCATTER * low else None


def _work(batch: Batch) -> tuple[int, int, int]:
    """Tokens, decode keys and prefill pairs, as in StepCost."""
    lengths = batch.lengths.astype(np.int64)
    keys = lengths * batch.start + lengths * (lengths + 1) // 2
    n = batch.num_decode
    return int(lengths.sum()), int(keys[:n].sum()), int(keys[n:].sum())


def fit(timings: list[Timing]) -> StepCost:
    """Prices of keys and pairs from shapes timed again with a longer context; what remains of the
    first timing is the price of their tokens, lowered to that of a larger step where it is more.
    """
    near: dict[int, Timing] = {}
    for timing in timings:
        near.setdefault(timing.tokens, timing)
    added = [np.subtract(t, near[t.tokens]) for t in timings if t is not near[t.tokens]]
    per_key = _lower_median([float(t[3] / t[1]) for t in added if t[1] > 0 and not t[2]])
    per_pair = _lower_median([float((t[3] - per_key * t[1]) / t[2]) for t in added if t[2] > 0])
    tokens, keys, pairs, seconds = np.array(sorted(near.values())).T
    bare = np.maximum(seconds - per_key * keys - per_pair * pairs, seconds / 2)
    return StepCost(
        tokens=tuple(tokens.astype(int).tolist()),
        seconds=tuple(np.minimum.accumulate(bare[::-1])[::-1].tolist()),
        per_decode_key_s=per_key,
        per_prefill_pair_s=per_pair,
    )


def _lower_median(prices: list[float]) -> float:
    """Not below 0; 0 of none. Lower, since what else a machine does only adds."""
    return max(sorted(prices)[(len(prices) - 1) // 2], 0.0) if prices else 0.0


def probe_batch(
    engine: EngineLike,
    dummy_page: int,
    shape: StepShape,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    edited: bool = False,
    num_ids: int = 1,
) -> Batch | None:
    """A batch of that shape, or None where the engine has too few rows or too short a context.

    edited: sampled as a batch in which some req edits its logits or asks for log-probabilities.
    num_ids: how many ids the chunk has in turn.
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
        chunk_ids=np.arange(shape.chunk, dtype=np.int32) % num_ids,
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
