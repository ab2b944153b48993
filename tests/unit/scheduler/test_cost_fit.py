"""The step cost that a server fits to its steps, against engines of other speeds."""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, VirtualEngine, read_cost
from minisgl.core import SchedulerConfig, StepCost, StepWork
from minisgl.core.batch import Batch, PendingStep
from minisgl.message.messages import AddReq, LeaderStep, SetStepCost
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.cost_fit import ANNOUNCE_S, CostFit
from minisgl.scheduler.inbox import FollowerInbox, Inbox
from minisgl.utils.process import write_socket_key
from tests.unit.scheduler.scripted import ScriptedParams

FIRST = read_cost(DEFAULT_COST)
DECODE = StepWork(16, 16_000, 0)
LEARNED_STEPS = 200


def scaled(factor: float, seed: int) -> StepCost:
    """FIRST times a factor. Each time and price also has a factor of its own, 0.8 to 1.25."""
    rng = np.random.default_rng(seed)

    def own() -> float:
        return factor * math.exp(rng.uniform(-1, 1) * math.log(1.25))

    seconds = np.maximum.accumulate([own() * each for each in FIRST.seconds])
    return StepCost(
        tokens=FIRST.tokens,
        seconds=tuple(seconds.tolist()),
        per_decode_key_s=own() * FIRST.per_decode_key_s,
        per_prefill_pair_s=own() * FIRST.per_prefill_pair_s,
    )


def build(engine: VirtualEngine, inbox: Inbox, fits: Sequence[CostFit] = ()) -> Scheduler:
    return Scheduler(
        engine,
        SchedulerConfig(),
        vocab_size=1000,
        eos_token_ids=(999,),
        inbox=inbox,
        send=lambda output: None,
        clock=lambda: engine.now_s,
        cost=FIRST,
        fits=fits,
    )


def no_wait() -> float:
    return 0.0


class Load:
    """A scheduler on a simulated engine, with requests that arrive at random."""

    def __init__(self, true: StepCost, fits: Sequence[CostFit], seed: int) -> None:
        self.engine = EngineSettings(true, 49_000, 256, 40_960).engine()
        self.inbox = LocalInbox()
        self.scheduler = build(self.engine, self.inbox, fits)
        self.ratios: list[float] = []
        self._true, self._rng, self._uid = true, np.random.default_rng(seed), 0
        self._launch: Callable[[Batch], PendingStep] = self.engine.launch
        self.engine.launch = self.launch  # type: ignore[assignment, method-assign]

    def launch(self, batch: Batch) -> PendingStep:
        """Compare the prediction of the scheduler with the time of the step."""
        self.ratios.append(
            self.scheduler.view.cost.predict_s(batch.work()) / self._true.predict_s(batch.work())
        )
        return self._launch(batch)

    def run(self, steps: int) -> None:
        end = len(self.ratios) + steps
        while len(self.ratios) < end:
            if self._uid < 12 or self._rng.random() < 0.04:
                self._uid += 1
                ids = self._rng.integers(0, 999, self._rng.integers(30, 3000)).astype("<i4")
                most = int(self._rng.integers(100, 600))
                params = ScriptedParams(max_tokens=most, ignore_eos=True)
                message = AddReq(uid=self._uid, token_ids=ids.tobytes(), sampling=params)
                self.inbox.messages.append(message)
            self.scheduler.iterate()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 2.0, 5.0])
def test_predictions_are_within_a_tenth_after_200_steps(factor: float, seed: int) -> None:
    load = Load(scaled(factor, seed), [CostFit(FIRST)], seed)
    load.run(LEARNED_STEPS + 200)
    errors = np.abs(np.array(load.ratios[LEARNED_STEPS:]) - 1)
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.9) < 0.1
    if factor != 1.0:
        assert abs(load.ratios[0] - 1) > 0.4, "the first cost is wrong"


def test_the_price_of_a_decode_request_is_learned() -> None:
    """Each request reads its recurrent states: here in as long as 550 keys, then in three times
    that."""
    first = msgspec.structs.replace(FIRST, per_decode_req_s=2e-5)
    assert read_cost(str(first)).per_decode_req_s == first.per_decode_req_s
    true = msgspec.structs.replace(first, per_decode_req_s=6e-5)
    load = Load(true, [CostFit(first)], 0)
    load.run(LEARNED_STEPS + 200)
    errors = np.abs(np.array(load.ratios[LEARNED_STEPS:]) - 1)
    assert np.quantile(errors, 0.9) < 0.1


def test_predictions_follow_a_device_that_gets_warm() -> None:
    """At its power limit a warm GPU takes 8 % longer. The times of steps scatter by 5 %."""
    work = StepWork(64, 0, 0)
    fit, cool, rng = CostFit(FIRST), FIRST.predict_s(work), np.random.default_rng(0)
    for step in range(5200):
        warm = 1.0 if step < 5000 else 1.08
        fit.record(work, cool * warm * rng.normal(1, 0.05))
    assert fit.cost().predict_s(work) == pytest.approx(1.08 * cool, rel=0.03)


def test_a_fixed_cost_stays() -> None:
    load = Load(scaled(2.0, 0), (), 0)
    load.run(100)
    assert load.scheduler.view.cost == FIRST


def test_three_slow_steps_in_a_row_change_nothing_and_a_fourth_does() -> None:
    fit, usual = CostFit(FIRST), FIRST.predict_s(DECODE)
    for _ in range(3):
        fit.record(DECODE, 10 * usual)
    assert fit.cost() == FIRST
    fit.record(DECODE, usual)
    for _ in range(3):
        fit.record(DECODE, 10 * usual)
    assert fit.cost() == FIRST, "a usual step came between them"
    fit.record(DECODE, 10 * usual)
    assert fit.cost().predict_s(DECODE) > 1.1 * usual


@pytest.mark.parametrize(("factor", "bound"), [(1000.0, 8.0), (0.001, 0.25)])
def test_a_price_changes_by_a_quarter_in_a_step_and_stays_in_its_bounds(
    factor: float, bound: float
) -> None:
    fit, usual = CostFit(FIRST), FIRST.predict_s(DECODE)
    before = np.array(fit.cost().seconds)
    for _ in range(100):
        fit.record(DECODE, factor * usual)
        after = np.array(fit.cost().seconds)
        change = np.abs(np.log(after / before)).max()
        assert change < math.log(1.25) + 1e-9
        before = after
    times = np.array(fit.cost().seconds) / FIRST.seconds
    assert max(times.max(), 1 / times.min()) == pytest.approx(max(bound, 1 / bound))


def test_sizes_without_steps_follow_the_others() -> None:
    fit = CostFit(FIRST)
    for _ in range(100):
        fit.record(DECODE, 2 * FIRST.predict_s(DECODE))
    cost = fit.cost()
    for tokens, least in ((64, 1.8), (512, 1.6), (2048, 1.6)):
        assert least < cost.predict_s(StepWork(tokens)) / FIRST.predict_s(StepWork(tokens)) < 2.1


def test_times_rise_with_the_tokens_and_the_measured_ones_count() -> None:
    """Steps of 256 tokens take as long as 512, and 384 tokens had a few short steps."""
    fit, slow = CostFit(FIRST), FIRST.predict_s(StepWork(512))
    for step in range(200):
        fit.record(StepWork(256, 0, 0), slow)
        if step % 100 == 0:
            fit.record(StepWork(384, 0, 0), 0.5 * slow)
    seconds = fit.cost().seconds
    assert list(seconds) == sorted(seconds)
    assert fit.cost().predict_s(StepWork(256)) == pytest.approx(slow, rel=0.05)


def test_a_cost_is_news_at_first_and_then_after_a_change_and_a_quarter_of_a_second() -> None:
    fit, usual = CostFit(FIRST), FIRST.predict_s(DECODE)
    assert fit.news(10.0) == FIRST
    assert fit.news(20.0) is None, "nothing has changed"
    for _ in range(20):
        fit.record(DECODE, 2 * usual)
    cost = fit.news(30.0)
    assert cost is not None
    assert cost.predict_s(DECODE) > 1.8 * usual
    for _ in range(20):
        fit.record(DECODE, usual)
    assert fit.news(30.0 + 0.9 * ANNOUNCE_S) is None
    assert fit.news(30.0 + ANNOUNCE_S) is not None


def test_every_rank_plans_with_the_cost_of_rank_0(tmp_path) -> None:
    write_socket_key(str(tmp_path))
    address = endpoint(str(tmp_path), "rank-1")
    follower = FollowerInbox(Receiver(address, LeaderStep))
    other = build(EngineSettings(FIRST, 100, 8, 1000).engine(), follower)
    fit = CostFit(FIRST)
    load = Load(scaled(2.0, 0), [fit], 0)
    load.inbox._followers = [Sender(address)]
    for _ in range(300):
        load.scheduler.message_wait_s()
        cost = fit.news(load.engine.now_s)
        load.inbox.receive(no_wait, None, [SetStepCost(cost=cost)] if cost else [])
        for message in follower.receive(no_wait, None, [SetStepCost(cost=scaled(3.0, 1))]):
            other._handle(message)
            load.scheduler._handle(message)
        assert other.view.cost == load.scheduler.view.cost
        fit.record(DECODE, 2 * FIRST.predict_s(DECODE))
        load.engine.now_s += 0.01
    assert other.view.cost.predict_s(DECODE) == pytest.approx(2 * FIRST.predict_s(DECODE), rel=0.05)
