"""Timing of steps without requests, from which the engine learns the time of a step."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minisgl.core import Batch, EngineLike, PageUpdates, StepCost
from minisgl.engine.warmup import StepShape, warmup_batch

_TIME_LIMIT_NS = 3 * 10**9  # of a whole calibration; slow machines stop at smaller sizes
_REPEATS = 3  # timings that are taken together
_MAX_ROUNDS = 3  # of _REPEATS timings, until they agree
_SETTLED_NS = 60 * 10**6  # of a shape with prompt tokens, since a GPU's clock follows power slowly
_HEAT_S = 0.3  # of steps with prompt tokens, before the larger ones are timed
_SCATTER = 1.1  # two durations agree if the longer one is at most this many times the shorter one
_LONGEST_STEP_S = 0.06  # shapes with a longer predicted time are left out


class Timing(NamedTuple):
    """The arguments of StepCost.predict_s for one step, and the seconds that it took."""

    tokens: int
    decode_keys: int
    prefill_pairs: int
    seconds: float


def calibrate(
    engine: EngineLike,
    max_chunk_tokens: int,
    vocab_size: int,
    slowest_ns: Callable[[int], int],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> StepCost:
    """Time steps of growing size until the time is up or a step would take long, and fit the cost.

    At its power limit, a GPU needs 5 % more time (8B, H200) when it is warm and the data differ
    than when it is rested and all values are zero. So the steps have different ids, and larger
    steps are timed only after some time of work.

    slowest_ns(own) returns the longest duration of all ranks. All decisions depend on such agreed
    durations only, so every rank runs the same steps (they hold collectives) and returns the same
    cost. A shape is left out if its durations do not settle, because the machine does other work.
    """
    timings: list[Timing] = []
    watch, hot = _StopWatch(engine, slowest_ns, clock_ns), False
    for shape in _shapes(engine.max_running_reqs, engine.max_seq_len):
        known = len(timings) > 1
        if known and watch.expired:
            break
        batch = warmup_batch(engine, shape, num_ids=vocab_size)
        if batch is None or shape.chunk > max_chunk_tokens:
            continue
        work = _work(batch)
        predicted_s = fit(timings).predict_s(*work) if known else 0.0
        if predicted_s > _LONGEST_STEP_S:
            continue
        if known and shape.chunk and not hot:
            watch.durations_ns(batch, int(_HEAT_S / predicted_s))
            hot = True
        median_ns = watch.median_ns(batch, _SETTLED_NS if shape.chunk else 0, required=not known)
        if median_ns is not None:
            timings.append(Timing(*work, median_ns / 1e9))
    return fit(timings)


@dataclass(slots=True)
class _StopWatch:
    """Times steps for `calibrate`, and counts the time that this takes."""

    _engine: EngineLike
    _slowest_ns: Callable[[int], int]
    _clock_ns: Callable[[], int]
    _spent_ns: int = 0

    @property
    def expired(self) -> bool:
        return self._spent_ns > _TIME_LIMIT_NS

    def median_ns(self, batch: Batch, least_ns: int, required: bool) -> int | None:
        """Time the batch until its durations add up to least_ns and agree; return their median.

        Returns None if they do not agree; with `required`, the shortest of them, because other work
        on the machine only makes steps longer.
        """
        durations_ns: list[int] = []
        median_ns = None
        for _ in range(_MAX_ROUNDS):
            durations_ns += self.durations_ns(batch, _REPEATS)
            median_ns = _agreed_median(durations_ns)
            if self.expired or (median_ns is not None and sum(durations_ns) >= least_ns):
                break
        return min(durations_ns) if required and median_ns is None else median_ns

    def durations_ns(self, batch: Batch, repeats: int) -> list[int]:
        """Return the times from the end of one step to the end of the next, of the slowest rank.

        The next step is always launched before the one in progress ends, as in serving.
        """
        ends_ns: list[int] = []
        running = self._engine.launch(batch)
        no_updates = PageUpdates(*(array[:0] for array in batch.page_updates))
        batch = replace(batch, page_updates=no_updates)  # sent once; real steps have few
        for _ in range(repeats + 1):
            following = self._engine.launch(batch)
            running.wait()
            ends_ns.append(self._clock_ns())
            running = following
        running.wait()
        own_ns = [after - before for before, after in itertools.pairwise(ends_ns)]
        agreed_ns = [self._slowest_ns(duration_ns) for duration_ns in own_ns]
        self._spent_ns += sum(agreed_ns)
        return agreed_ns


def _shapes(rows: int, max_seq_len: int) -> list[StepShape]:
    """Return the shapes to time, roughly by rising time. Some come again with a longer context.

    Small shapes only decode, up to all rows; the others have one decode request beside a chunk. The
    large chunks have a context before them, like most chunks whose time is predicted: the first
    tokens of a prompt take less time.
    """
    half, far = min(max_seq_len - 1, 2048) // 2, min(max_seq_len * 3 // 4, 8192)
    shapes = [StepShape(1, 0, 1), StepShape(1, 15, 1)]
    for reqs in (8, 32, 64, 128):
        decode = [StepShape(reqs, 0, 1), StepShape(reqs, 0, half)]
        shapes += decode if reqs <= rows else [StepShape(1, reqs - 1, 1)]
    shapes += [StepShape(1, size - 1, half) for size in (256, 384, 512, 640, 768)]
    shapes.append(StepShape(1, 511, far))
    return shapes + [StepShape(1, size - 1, half) for size in (1024, 2048, 4096, 8192)]


def _agreed_median(durations_ns: list[int]) -> int | None:
    """Return the median if one of its neighbours agrees with it; None otherwise, or for few values.

    The minimum would be wrong: when the host notices the end of a step late, the next step seems
    too short.
    """
    if len(durations_ns) < 3:
        return None
    middle = (len(durations_ns) - 1) // 2
    low, median, high = sorted(durations_ns)[middle - 1 : middle + 2]
    return median if high <= _SCATTER * median or median <= _SCATTER * low else None


def _work(batch: Batch) -> tuple[int, int, int]:
    """Return tokens, decode keys and prefill pairs of a batch, as StepCost counts them."""
    lengths = batch.lengths.astype(np.int64)
    keys = lengths * batch.start + lengths * (lengths + 1) // 2
    n = batch.num_decode
    return int(lengths.sum()), int(keys[:n].sum()), int(keys[n:].sum())


def fit(timings: list[Timing]) -> StepCost:
    """Fit a StepCost to timings by rising time.

    Shapes with the same number of tokens but longer contexts give the costs of keys and pairs. The
    rest of the first timing of each size is the cost of its tokens. It is lowered to that of a
    larger step if it is higher.
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
    """Return the lower median, at least 0.0; 0.0 for no values.

    Of two middle values the lower one is better, because other work only adds time.
    """
    return max(sorted(prices)[(len(prices) - 1) // 2], 0.0) if prices else 0.0
