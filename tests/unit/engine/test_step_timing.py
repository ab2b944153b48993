"""Calibration of the step cost in virtual time, also on a machine that does other work."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from minisgl.core import Batch, StepCost
from minisgl.drafts import PricedLengths
from minisgl.engine.step_timing import Timing, change_of, fit, time_steps
from tests.unit.engine.virtual_engine import TRUE, VirtualEngine, VirtualPending


def calibrated(
    engine: VirtualEngine,
    slowest_ns: Callable[[int], int] = lambda own: own,
    drafting: bool = False,
) -> StepCost:
    return fit(timed(engine, slowest_ns, drafting))


def timed(
    engine: VirtualEngine,
    slowest_ns: Callable[[int], int] = lambda own: own,
    drafting: bool = False,
) -> list[Timing]:
    return time_steps(engine, 8192, 50_000, drafting, slowest_ns, lambda: engine.now_ns)


def changed(timings: list[Timing], engine: VirtualEngine, drafting: bool = False) -> float:
    limits = 8192, 50_000, drafting
    return change_of(timings, 1.25, engine, *limits, lambda own: own, lambda: engine.now_ns)


def with_rows(engine: VirtualEngine, rows: int) -> VirtualEngine:
    engine.max_running_reqs = rows
    return engine


SHAPES = [(1, 1, 0), (64, 64 * 1024, 0), (448, 64_000, 384 * 4000), (512, 64_000, 448 * 6000)]


def largest_error(cost: StepCost, factor: float = 1.0) -> float:
    """Return the largest relative error over some steps that the planner predicts."""
    pairs = [(cost.predict_s(*shape), factor * TRUE.predict_s(*shape)) for shape in SHAPES]
    return max(abs(found / true - 1) for found, true in pairs)


def test_calibration_finds_the_cost_of_steps() -> None:
    engine = VirtualEngine()
    assert largest_error(calibrated(engine)) < 0.01
    assert engine.now_ns < 2e9, "the start of the server waits for the calibration"


class PowerLimitedGpu(VirtualEngine):
    """A GPU that reaches its power limit after 0.2 s of prompt tokens.

    Steps take 7 % less time before that, and 5 % less time if all ids are equal.
    """

    worked_ns = 0

    def launch(self, batch: Batch) -> VirtualPending:
        long = len(batch.chunk_ids) > 128
        rested, alike = self.worked_ns < 2e8, len(set(batch.chunk_ids.tolist())) == 1
        factor = (0.93 if long and rested else 1.0) * (0.95 if long and alike else 1.0)
        self.disturb = lambda tokens, launch: factor
        began_ns = max(self.now_ns, self.free_ns)
        pending = super().launch(batch)
        self.worked_ns += self.free_ns - began_ns if long else 0
        return pending


def test_costs_are_those_of_a_gpu_at_its_power_limit() -> None:
    """On a cool GPU with equal ids, the timed steps took 5 to 8 % less time than in serving."""
    assert largest_error(calibrated(PowerLimitedGpu())) < 0.01


def test_disturbed_steps_do_not_change_the_cost() -> None:
    engine = VirtualEngine(lambda tokens, launch: 1.0 if launch % 3 else 5.0)
    assert largest_error(calibrated(engine)) < 0.01


def test_a_shape_whose_durations_scatter_is_left_out() -> None:
    noise = np.random.default_rng(0)
    engine = VirtualEngine(lambda tokens, _: noise.uniform(1, 10) if tokens == 384 else 1.0)
    cost = calibrated(engine)
    assert 384 not in cost.tokens
    assert {256, 512} <= set(cost.tokens)
    assert largest_error(cost) < 0.01


def test_a_machine_that_was_busy_for_a_while_does_not_count_as_slow() -> None:
    engine = VirtualEngine(lambda tokens, _: 3.0 if 2 <= tokens <= 32 else 1.0)
    assert largest_error(calibrated(engine)) < 0.01, "no step costs more than a larger one"


def test_a_slow_machine_stops_early() -> None:
    engine = VirtualEngine(lambda tokens, _: 300.0)
    cost = calibrated(engine)
    assert engine.now_ns < 20e9
    assert len(cost.tokens) == 2
    assert cost.predict_s(1, 0, 0) == pytest.approx(300 * TRUE.predict_s(1, 0, 0), rel=1e-4)


def test_the_slowest_rank_decides() -> None:
    assert largest_error(calibrated(VirtualEngine(), lambda own: 2 * own), factor=2.0) < 0.01


def test_fit_finds_the_cost_that_made_the_timings() -> None:
    true = StepCost(
        tokens=(1, 8, 256, 512),
        seconds=(0.004, 0.0045, 0.007, 0.012),
        per_decode_key_s=5e-8,
        per_prefill_pair_s=1e-9,
    )
    work = [(1, 0, 0), (8, 8, 0), (8, 8192, 0), (256, 2, 256 * 128), (512, 2, 512 * 256)]
    work += [(512, 8192, 511 * 8448)]
    found = fit([Timing(*one, true.predict_s(*one)) for one in work])
    assert found.tokens == true.tokens
    assert found.seconds == pytest.approx(true.seconds)
    assert found.per_decode_key_s == pytest.approx(true.per_decode_key_s)
    assert found.per_prefill_pair_s == pytest.approx(true.per_prefill_pair_s)


def test_a_disturbed_timing_costs_no_more_than_a_larger_step() -> None:
    timings = [Timing(1, 1, 0, 0.004), Timing(16, 1, 120, 0.6), Timing(64, 64, 0, 0.005)]
    cost = fit([*timings, Timing(64, 9000, 0, 0.004)])
    assert cost.seconds == (0.004, 0.005, 0.005)
    assert cost.per_decode_key_s == cost.per_prefill_pair_s == 0.0, (
        "a longer context that takes less time is noise"
    )
    assert cost.predict_s(128, 0, 0) == pytest.approx(0.010), "proportional beyond the last size"


def test_few_rows_are_calibrated_between_small_steps_and_chunks() -> None:
    cost = calibrated(with_rows(VirtualEngine(), 4))
    assert {16, 32, 64, 128, 256} <= set(cost.tokens)
    assert cost.predict_s(100, 0, 0) == pytest.approx(TRUE.predict_s(100, 0, 0), rel=0.05)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 100])
def test_steps_of_all_sizes_are_timed_with_any_number_of_rows(rows: int, drafting: bool) -> None:
    """With one row, no shape may have two requests. A slow machine gets only the first two."""
    timings = timed(with_rows(VirtualEngine(), rows), drafting=drafting)
    cost = fit(timings)
    assert {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048} <= set(cost.tokens)
    assert largest_error(cost) < 0.01
    assert timings[0].tokens < timings[1].tokens
    assert len({timing[:3] for timing in timings}) == len(timings), "each step is timed once"


class SlowChunks(VirtualEngine):
    """Steps with a chunk take 1.5 times as long as decode steps with as many tokens."""

    def launch(self, batch: Batch) -> VirtualPending:
        self.disturb = lambda tokens, launch: 1.5 if len(batch.chunk_ids) else 1.0
        return super().launch(batch)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
def test_drafts_have_the_price_of_decode_steps(rows: int) -> None:
    cost = calibrated(with_rows(SlowChunks(), rows), drafting=True)
    reqs, counts = np.arange(rows, dtype=np.int32), np.full(rows, 7, dtype=np.int32)
    for tokens in (rows, 2 * rows, 4 * rows, 8 * rows):
        true_s = TRUE.predict_s(tokens, 500 * rows, 0)
        assert cost.predict_s(tokens, 500 * rows, 0) == pytest.approx(true_s, rel=0.02)
    lengths = PricedLengths(rows)
    for _ in range(20):
        lengths.record(reqs, counts, counts)
    assert lengths.choose(reqs, rows, 500 * rows, 7, cost) == 7


def test_timings_of_the_same_engine_have_not_changed() -> None:
    timings = timed(VirtualEngine())
    later = VirtualEngine(lambda tokens, launch: 1.0 if launch % 3 else 5.0)
    assert changed(timings, later) == pytest.approx(1.0)
    assert later.now_ns < 0.4e9, "the check takes less time than a calibration"


@pytest.mark.parametrize("factor", [0.5, 1.5])
@pytest.mark.parametrize("slow", ["every step", "decode", "long steps"])
def test_a_change_of_some_steps_is_found(factor: float, slow: str) -> None:
    timings = timed(VirtualEngine())
    tokens_of = {
        "every step": range(1, 10_000),
        "decode": range(1, 2),
        "long steps": range(250, 10_000),
    }
    later = VirtualEngine(lambda tokens, _: factor if tokens in tokens_of[slow] else 1.0)
    assert changed(timings, later) == pytest.approx(max(factor, 1 / factor), rel=0.01)


def test_other_work_during_the_check_is_no_change() -> None:
    """The first rounds of each step take three times as long."""
    timings, later = timed(VirtualEngine()), VirtualEngine()
    seen: dict[int, int] = {}

    def disturb(tokens: int, launch: int) -> float:
        seen[tokens] = seen.get(tokens, 0) + 1
        return 3.0 if seen[tokens] <= 12 else 1.0

    later.disturb = disturb
    assert changed(timings, later) == pytest.approx(1.0, rel=0.01)


def test_a_step_that_the_host_bounds_is_not_checked() -> None:
    """The time of short steps with a chunk differs from start to start without any change."""
    timings = timed(VirtualEngine())
    later = VirtualEngine(lambda tokens, _: 2.0 if 256 <= tokens <= 384 else 1.0)
    assert changed(timings, later) == pytest.approx(1.0, rel=0.01)


def test_a_timing_that_was_disturbed_is_not_checked() -> None:
    """A burst of other work made the first timing six times as long as usual."""
    timings = timed(VirtualEngine(lambda tokens, _: 6.0 if tokens == 1 else 1.0))
    assert timings[0].seconds > 3 * timings[1].seconds
    assert changed(timings, VirtualEngine()) == pytest.approx(1.0, rel=0.01)


def test_timings_of_steps_that_the_engine_cannot_run_have_changed() -> None:
    timings = timed(VirtualEngine())
    smaller = VirtualEngine()
    smaller.max_seq_len = 512
    assert changed(timings, smaller) == math.inf


def test_timings_of_steps_that_are_no_longer_timed_have_changed() -> None:
    """With drafts, eight tokens of one row are a decode step."""
    one_row = with_rows(VirtualEngine(), 1)
    timings = timed(one_row)
    assert changed(timings, one_row) == pytest.approx(1.0)
    assert changed(timings, one_row, drafting=True) == math.inf
