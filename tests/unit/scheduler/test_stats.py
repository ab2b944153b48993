"""The counts of forward steps by phase, and the sums of their times."""

from dataclasses import replace

import numpy as np

from minisgl.core import FREE_STEPS, StepWork
from minisgl.core.batch import Batch, EditedReq, PageUpdates, StepResult
from minisgl.message.stats import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS
from minisgl.scheduler.cost_fit import CostFit
from minisgl.scheduler.stats import InFlight, StepMeter
from tests.unit.scheduler.fake_engine import FakeEngine
from tests.unit.scheduler.harness import Harness


def batch(decode: int, chunks: tuple[int, ...] = ()) -> Batch:
    empty = np.empty(0, dtype=np.int32)
    count = decode + len(chunks)
    return Batch(
        step_id=1,
        num_decode=decode,
        rows=np.arange(count, dtype=np.int32),
        start=np.zeros(count, dtype=np.int32),
        lengths=np.array([1] * decode + list(chunks), dtype=np.int32),
        samples=np.ones(count, dtype=np.bool_),
        chunk_ids=np.zeros(sum(chunks), dtype=np.int32),
        page_updates=PageUpdates(empty, empty, empty),
        sampling={},
    )


def in_flight(batch: Batch, began_s: float, launch_s: float = 0.0) -> InFlight:
    pending = FakeEngine(num_pages=4, page_size=4).launch(batch)
    return InFlight(batch, pending, began_s, launch_s, 0.0)


NO_TOKENS = np.zeros((0, 1), dtype=np.int32)
RESULT = StepResult(NO_TOKENS, NO_TOKENS[:, 0], np.zeros(0, dtype=np.bool_))
IN_LAUNCH = RESULT._replace(ended_in_launch=True)


class RecordedTimes(CostFit):
    """Keeps the times of steps."""

    def __init__(self) -> None:
        super().__init__(FREE_STEPS)
        self.seconds: list[float] = []

    def record(self, work: StepWork, seconds: float) -> None:
        self.seconds.append(seconds)


def test_steps_are_counted_by_phase_size_and_graph() -> None:
    meter = StepMeter()
    steps = [
        (batch(0, (5, 20)), False),
        (batch(3, (7,)), False),
        (batch(2), True),
        (batch(2), True),
    ]
    for step, by_graph in steps:
        meter.record_result(in_flight(step, meter.clock()), RESULT._replace(by_graph=by_graph))
    prefill, decode, mixed = (meter.phases[name] for name in ("prefill", "decode", "mixed"))
    assert (prefill.eager_steps, prefill.graph_steps) == (1, 0)
    assert (prefill.reqs, prefill.tokens) == (2, 25)
    assert (mixed.eager_steps, mixed.reqs, mixed.tokens) == (1, 4, 10)
    assert (decode.eager_steps, decode.graph_steps, decode.reqs, decode.tokens) == (0, 2, 4, 4)
    assert decode.reqs_counts[BATCH_SIZE_BOUNDS.index(2)] == 2, "a bucket includes its bound"
    assert prefill.tokens_counts[BATCH_TOKENS_BOUNDS.index(32)] == 1
    assert sum(decode.reqs_counts) == sum(decode.tokens_counts) == 2


def test_a_step_above_all_bounds_is_in_the_last_bucket() -> None:
    meter = StepMeter()
    meter.record_result(in_flight(batch(0, (BATCH_TOKENS_BOUNDS[-1] + 1,)), meter.clock()), RESULT)
    assert meter.phases["prefill"].tokens_counts[-1] == 1


def test_overlapped_time_counts_once() -> None:
    """Two steps are launched at 0 and 2 and end at 5 and 9. After a pause, a third takes 1 s."""
    times = iter([5.0, 9.0, 21.0])
    recorded = RecordedTimes()
    meter = StepMeter(lambda: next(times), [recorded])
    for began_s in (0.0, 2.0):
        meter.record_result(in_flight(batch(1), began_s), RESULT)
    assert meter.phases["decode"].seconds == 9.0
    meter.record_result(in_flight(batch(1), 20.0), RESULT)
    assert meter.phases["decode"].seconds == 10.0
    assert recorded.seconds == [4.0], "only the second step found the device busy"


def test_a_step_after_an_end_that_was_noticed_late_has_no_known_time() -> None:
    """Regression: chunks seemed to take half of their time beside short decode steps."""
    times = iter([5.0, 9.0, 12.0, 16.0])
    recorded = RecordedTimes()
    meter = StepMeter(lambda: next(times), [recorded])
    for late in (False, True, False, False):
        meter.record_result(in_flight(batch(1), 0.0), RESULT._replace(late=late))
    assert recorded.seconds == [4.0], "both ends of the last step alone were on time"


def test_a_step_that_ends_in_its_launch_takes_the_time_of_the_launch() -> None:
    """On a CPU the result is read after the next launch, which has taken 7 s."""
    recorded = RecordedTimes()
    meter = StepMeter(lambda: 10.5, [recorded])
    meter.record_result(in_flight(batch(1), began_s=1.0, launch_s=2.0), IN_LAUNCH)
    assert recorded.seconds == [2.0]


def test_steps_with_token_masks_are_priced_if_the_time_of_the_masks_is_known() -> None:
    """It is known on a CPU. Regression: the fitted cost was wrong beside many grammars."""
    times = iter([9.0, 12.0, 13.0])
    recorded = RecordedTimes()
    meter = StepMeter(lambda: next(times), [recorded])
    edited = replace(batch(1), logit_edits=(EditedReq(0, 1, 1, None, ()),))
    meter.record_result(in_flight(edited, 1.0, launch_s=2.0), IN_LAUNCH)
    for _ in range(2):
        meter.record_result(in_flight(edited, 2.0), RESULT)
    assert recorded.seconds == [2.0]


def test_the_remaining_time_uses_the_shorter_of_two_decode_steps() -> None:
    """The host noticed one end late, so the next step seems short. Mixed steps do not count."""
    times = iter([10.0, 24.0, 30.0, 60.0, 61.0, 61.0])
    meter = StepMeter(clock=lambda: next(times))
    for step in (batch(1), batch(1), batch(1), batch(1, (100,))):
        meter.record_result(in_flight(step, began_s=0.0), RESULT)
    assert meter.remaining_s(predicted_s=8.0) == 60.0 + min(14.0, 6.0) - 61.0
    assert meter.remaining_s(predicted_s=4.0) == 60.0 + 4.0 - 61.0


def test_scheduler_stats_hold_every_step_and_every_token() -> None:
    """The prefill gives the first of eight tokens, and seven decode steps give the others."""
    harness = Harness(FakeEngine(num_pages=64, page_size=4))
    harness.add(list(range(1, 21)), max_tokens=8, ignore_eos=True)
    while not harness.scheduler.idle or harness.inbox.messages:
        harness.step()
    phases = harness.scheduler.stats().phases
    assert (phases["prefill"].eager_steps, phases["prefill"].tokens) == (1, 20)
    assert (phases["decode"].eager_steps, phases["decode"].tokens) == (7, 7)
    assert phases["mixed"].eager_steps == 0
    assert all(phase.graph_steps == 0 for phase in phases.values())


def test_prefill_done_has_the_time_of_admission() -> None:
    harness = Harness(FakeEngine(num_pages=64, page_size=4))
    harness.add([1, 2, 3], max_tokens=1)
    harness.scheduler.iterate()
    harness.scheduler.drain_in_flight()
    (done,) = [done for output in harness.outbox for done in output.prefill_done]
    assert done.admitted_s > 0
