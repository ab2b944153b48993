"""Times steps without requests, to fit the formula that predicts the time of a step."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from minisgl.core import Batch, EngineLike, PageUpdates, StepCost
from minisgl.core.batch import DRAFT_WIDTHS
from minisgl.engine.warmup import StepShape, warmup_batch

_TIME_LIMIT_NS = 3 * 10**9  # of a whole calibration; slow machines stop at smaller sizes
_REPEATS = 3  # timings in one round
_MAX_ROUNDS = 3  # limit of the rounds for one shape
# A shape with prompt tokens is timed for this long, because a GPU adapts its clock slowly.
_SETTLED_NS = 60 * 10**6
_HEAT_S = 0.3  # duration of untimed steps with prompt tokens, which warm up the GPU
_SCATTER = 1.1  # two durations agree if the longer one is at most this many times the shorter one
_LONGEST_STEP_S = 0.06  # shapes with a longer predicted time are left out
_LONGEST_CHECK_S = 0.016  # limit of the long step of a check
_CHECK_ROUNDS = 5  # limit of the rounds for one step of a check
_SMALL = (8, 32, 64, 128)  # tokens; with enough rows, such a shape has only decode requests


class Timing(NamedTuple):
    """The arguments of StepCost.predict_s for one step, and the seconds that it took."""

    tokens: Annotated[int, Meta(ge=1)]
    decode_keys: Annotated[int, Meta(ge=0)]
    prefill_pairs: Annotated[int, Meta(ge=0)]
    seconds: Annotated[float, Meta(gt=0)]


def time_steps(
    engine: EngineLike,
    max_chunk_tokens: int,
    vocab_size: int,
    drafting: bool,
    slowest_ns: Callable[[int], int],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> list[Timing]:
    """Time steps of growing size until the time limit. `fit` computes a StepCost from the timings.

    A shape is left out if its predicted time is long, or if its durations scatter because the
    machine does other work.

    At its power limit, a warm GPU with different token ids takes 5 % longer than a cool GPU with
    values of zero (8B, H200). The timed steps therefore have different token ids, and the GPU works
    for some time before larger steps are timed.

    drafting: whether decode requests of this engine may forward drafts. slowest_ns(own) returns the
    longest duration of all ranks. Every decision depends only on these durations, so every rank
    returns the same timings and runs the same steps. The ranks must run the same steps because a
    step contains collectives.
    """
    timings: list[Timing] = []
    watch, hot = _StopWatch(engine, slowest_ns, clock_ns), False
    for shape, batch in _batches(engine, max_chunk_tokens, vocab_size, drafting):
        known = len(timings) > 1
        if known and watch.expired:
            break
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
    return timings


def change_of(
    timings: Sequence[Timing],
    largest_change: float,
    engine: EngineLike,
    max_chunk_tokens: int,
    vocab_size: int,
    drafting: bool,
    slowest_ns: Callable[[int], int],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Time the steps of `_check_steps` again, and return the largest factor between old and new.

    The factor is at least 1. It is infinite if time_steps would no longer time one of the old
    steps. The function times a step in rounds, and keeps the round with the smallest factor. It
    times no further round after a factor of at most largest_change: other work on the machine
    disturbs some rounds, but a change of the device shows in each round.

    timings: the result of an earlier time_steps. The arguments after largest_change are those of
    time_steps. All ranks return the same factor.
    """
    steps = _batches(engine, max_chunk_tokens, vocab_size, drafting)
    batches = {_work(batch): batch for _, batch in steps}
    if not batches.keys() >= {timing[:3] for timing in timings}:
        return math.inf
    # The first chunk with a long context would otherwise load its kernels while the engine serves.
    farthest = max(timings, key=lambda timing: timing.prefill_pairs / timing.tokens)
    engine.launch(batches[farthest[:3]]).wait()
    watch, largest = _StopWatch(engine, slowest_ns, clock_ns), 1.0
    for timing in _check_steps(timings):
        change = math.inf
        for _ in range(_CHECK_ROUNDS):
            durations_ns = watch.durations_ns(batches[timing[:3]], _REPEATS)
            found_s = statistics.median(durations_ns) / 1e9
            change = min(change, max(found_s / timing.seconds, timing.seconds / found_s))
            if change <= largest_change:
                break
        largest = max(largest, change)
    return largest


def _check_steps(timings: Sequence[Timing]) -> list[Timing]:
    """Return the first step, the decode step with the most keys, and a long step.

    On a GPU the device bounds the times of these steps: the decode steps are graphs, and the long
    step is the longest of at most _LONGEST_CHECK_S. Python launches a graph and attention for each
    layer of a shorter step with a chunk, so the host bounds its time. A step of Qwen3-0.6B with a
    chunk of 255 tokens took 3.9 to 7.1 ms in five processes on one H100 (medians of 12 rounds).

    A timing was disturbed if the cost that is fitted to all timings contradicts it. The function
    returns disturbed timings only if there are no others.
    """
    cost = fit(timings)
    ratios = [cost.predict_s(*timing[:3]) / timing.seconds for timing in timings]
    pairs = zip(timings, ratios, strict=True)
    known = [timing for timing, ratio in pairs if 1 / _SCATTER <= ratio <= _SCATTER] or timings
    decodes = [timing for timing in known if not timing.prefill_pairs] or known
    short = [timing for timing in known if timing.seconds <= _LONGEST_CHECK_S] or known[:1]
    most_keys = max(decodes, key=lambda timing: timing.decode_keys)
    longest = max(short, key=lambda timing: timing.seconds)
    return list(dict.fromkeys((known[0], most_keys, longest)))


def _batches(
    engine: EngineLike, max_chunk_tokens: int, vocab_size: int, drafting: bool
) -> Iterator[tuple[StepShape, Batch]]:
    """Yield the steps to time, without those that do not fit into the engine."""
    for shape in _shapes(engine.max_running_reqs, engine.max_seq_len, drafting):
        batch = warmup_batch(engine, shape, num_ids=vocab_size)
        if batch is not None and shape.chunk <= max_chunk_tokens:
            yield shape, batch


@dataclass(slots=True)
class _StopWatch:
    """Times steps for `time_steps`, and adds up the time of all timed steps."""

    _engine: EngineLike
    _slowest_ns: Callable[[int], int]
    _clock_ns: Callable[[], int]
    _spent_ns: int = 0

    @property
    def expired(self) -> bool:
        return self._spent_ns > _TIME_LIMIT_NS

    def median_ns(self, batch: Batch, least_ns: int, required: bool) -> int | None:
        """Time the batch until its durations add up to least_ns and agree; return their median.

        If the durations do not agree, returns None, or the shortest duration if `required` is set:
        other work on the machine only makes steps longer.
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
        """Return the times between the ends of two consecutive steps, on the slowest rank.

        As in serving, the next step is launched before the running step ends.
        """
        ends_ns: list[int] = []
        running = self._engine.launch(batch)
        no_updates = PageUpdates(*(array[:0] for array in batch.page_updates))
        # The first launch sent the page updates. The timed steps send none: real steps have few.
        batch = replace(batch, page_updates=no_updates)
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


def _shapes(rows: int, max_seq_len: int, drafting: bool) -> list[StepShape]:
    """Return the shapes to time, roughly from fast to slow.

    Some shapes appear twice, the second time with a longer context.

    Small shapes have only decode requests, at most `rows`. With `drafting`, requests forward
    several tokens if the shape has more tokens than the engine has rows. The other shapes have one
    chunk, and one decode request if the engine has a second row. A large chunk has cached context
    before it, because most predictions are for such chunks and the first tokens of a prompt take
    less time.
    """
    half, far = min(max_seq_len - 1, 2048) // 2, min(max_seq_len * 3 // 4, 8192)
    mixed_decodes = min(rows - 1, 1)
    largest_small = min(rows * DRAFT_WIDTHS[-1 if drafting else 0], _SMALL[-1])

    def mixed(tokens: int, context: int = half) -> StepShape:
        return StepShape(mixed_decodes, tokens - mixed_decodes, context)

    def small(tokens: int) -> StepShape:
        if tokens > largest_small:
            return mixed(tokens, context=1)
        width = next(width for width in DRAFT_WIDTHS if tokens <= rows * width)
        return StepShape(tokens // width, 0, 1, width)

    # The first two shapes have different numbers of tokens: their timings predict the next ones.
    shapes = [small(1), small(16)]
    for shape in map(small, sorted({*_SMALL, largest_small})):
        shapes.append(shape)
        if not shape.chunk:  # of few requests, only a long context changes the time measurably
            shapes.append(shape._replace(context=half if shape.num_decode >= 8 else far))
    shapes += [mixed(size) for size in (256, 384, 512, 640, 768)]
    shapes.append(mixed(512, far))
    shapes += [mixed(size) for size in (1024, 2048, 4096, 8192)]
    return list(dict.fromkeys(shapes))  # largest_small may be 1 or 16


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
    n, start, lengths = batch.num_decode, batch.start, batch.lengths.astype(np.int64)
    pairs = lengths * start + lengths * (lengths + 1) // 2
    return int(lengths.sum()), int((start + lengths)[:n].sum()), int(pairs[n:].sum())


def fit(timings: Sequence[Timing]) -> StepCost:
    """Fit a StepCost to timings in the order of _shapes.

    1. Two timings with the same number of tokens but different contexts give the cost of a decode
       key or of a prefill pair.
    2. The first timing of each number of tokens, minus the cost of its keys and pairs, is the cost
       of the tokens. The result is never below half of the timing.
    3. If a smaller step costs more than a larger step, it gets the cost of the larger step.
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


def _lower_median(costs: list[float]) -> float:
    """Return the lower median, at least 0.0; 0.0 for no values.

    Of two middle values the lower one is better, because other work only adds time.
    """
    return max(sorted(costs)[(len(costs) - 1) // 2], 0.0) if costs else 0.0
