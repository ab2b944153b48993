"""The fleet in virtual time: every request ends once; failures, rollouts and autoscaling."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import simulate
from minisgl.benchmark.fleet.autoscale import Autoscaler
from minisgl.benchmark.fleet.fleet import Fleet
from minisgl.benchmark.fleet.routers import ROUTERS, LeastLoad, RoundRobin, make_router
from minisgl.benchmark.trace import Turn
from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, read_cost
from tests.examples import examples
from tests.unit.benchmark.fleet.builders import HOST_S, STEP_S, STILL, load_of, prompt, run


def test_one_replica_gives_the_answers_of_bench_simulate() -> None:
    """The two loops deliver messages in different ways, but to the same scheduler."""
    source = np.random.default_rng(0)
    times_s = np.sort(source.uniform(0, 20, 60)).round(1)  # several arrive at the same time
    load = load_of(
        *(
            (
                float(at_s),
                prompt(i % 50, int(source.integers(1, 3000))),
                int(source.integers(1, 80)),
            )
            for i, at_s in enumerate(times_s)
        )
    )
    cost = read_cost(DEFAULT_COST)
    sizes = EngineSettings(cost, 2000, 8, 4096)
    expected = simulate(load, sizes.engine(), cost, sizes.config, concurrency=1)
    assert load.arrivals_s is not None
    found = Fleet(load, load.arrivals_s, sizes, STILL).run(RoundRobin()).answers
    assert [(a.sent_s, a.outputs_s, a.cached_tokens) for a in found] == [
        (a.sent_s, a.outputs_s, a.cached_tokens) for a in expected
    ]


@pytest.mark.parametrize("failures_s", [(), (0.01,)], ids=["answered", "given up"])
def test_a_turn_begins_after_the_request_before_it(failures_s: tuple[float, ...]) -> None:
    load = load_of((0.0, prompt(0), 5), (0.0, prompt(1), 5))
    load = load._replace(turns=[Turn(), Turn((0,), 20.0)])
    first, second = run(load, STILL._replace(failures_s=failures_s)).answers
    end_s = failures_s[0] if failures_s else first.outputs_s[-1]
    assert (first.error is None) == (not failures_s)
    assert second.sent_s == end_s + 20.0
    assert second.error is None


@given(
    st.lists(
        st.tuples(st.floats(0, 60), st.integers(0, 5), st.integers(1, 200), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(ROUTERS),
    st.lists(st.floats(0, 70), max_size=3),
    st.lists(st.floats(0, 70), max_size=2),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.05, 60.0]),
)
@settings(max_examples=examples(60))
def test_every_request_ends_once_with_all_tokens_or_an_error(
    requests: list[tuple[float, int, int, int]],
    router: str,
    failures_s: list[float],
    rollouts_s: list[float],
    replicas: int,
    retries: int,
    drain_s: float,
) -> None:
    load = load_of(*((at, prompt(seed, size), most) for at, seed, size, most in sorted(requests)))
    plan = STILL._replace(
        replicas=replicas,
        failures_s=tuple(failures_s),
        rollouts_s=tuple(rollouts_s),
        retries=retries,
        drain_s=drain_s,
    )
    chosen = make_router(router, 16, 100, seed=0)
    result = run(load, plan, chosen, sizes=(100, 4))
    for answer, tokens, at_s in zip(result.answers, load.max_tokens, sorted(requests), strict=True):
        assert answer.sent_s == at_s[0]
        complete = answer.output_tokens == len(answer.outputs_s) == tokens
        assert (answer.error is None and complete) or (answer.error and not answer.outputs_s)
        assert answer.outputs_s == sorted(answer.outputs_s)
        assert all(first_s >= answer.sent_s for first_s in answer.outputs_s[:1])
    assert result.resent <= retries * len(load.prompts)
    times_s = [count.at_s for count in result.counts]
    assert times_s == sorted(times_s)
    assert all(0 <= count.ready <= count.total <= replicas for count in result.counts)
    if not (failures_s or rollouts_s):
        assert not any(answer.error for answer in result.answers)


def test_the_front_end_delays_the_first_token() -> None:
    load = load_of((1.0, prompt(0), 3))
    [answer] = run(load, STILL._replace(front_end_s=0.25)).answers
    assert answer.outputs_s[0] == pytest.approx(1.25 + STEP_S + HOST_S)


def test_a_replica_that_dies_loses_its_requests() -> None:
    """At 1.02 the replica has sent two tokens. Its successor is ready at 11.02."""
    load = load_of((1.0, prompt(0), 50), (5.0, prompt(1), 2), (12.0, prompt(2), 2))
    plan = STILL._replace(failures_s=(1.025,))
    lost, refused, later = run(load, plan).answers
    assert lost.error == "the replica ended before the answer was complete"
    assert lost.outputs_s == []
    assert refused.error == "no replica is ready"
    assert later.error is None


def test_a_retry_counts_from_the_first_sending() -> None:
    load = load_of((1.0, prompt(0), 50))
    plan = STILL._replace(replicas=2, failures_s=(1.025,), retries=1)
    result = run(load, plan)
    [answer] = result.answers
    assert result.resent == 1
    assert answer.sent_s == 1.0
    assert answer.outputs_s[0] == pytest.approx(2.025 + STEP_S + HOST_S)
    assert len(answer.outputs_s) == 50


def test_outputs_of_an_iteration_that_ends_after_the_death_are_lost() -> None:
    """The only token would have come at 1.0103; the replica dies before."""
    plan = STILL._replace(failures_s=(1.005,))
    [answer] = run(load_of((1.0, prompt(0), 1)), plan).answers
    assert answer.error
    [answer] = run(load_of((1.0, prompt(0), 1)), STILL._replace(failures_s=(1.02,))).answers
    assert answer.error is None


def test_a_rollout_loses_no_request_and_stops_one_replica_at_a_time() -> None:
    """Each replica finishes its request, starts for 10 s and settles for 5 s."""
    requests = [(0.1 * index, prompt(index), 8) for index in range(1, 400)]
    plan = STILL._replace(replicas=3, rollouts_s=(5.0,))
    result = run(load_of(*requests), plan, LeastLoad(0), step_s=0.2)
    assert not any(answer.error for answer in result.answers)
    assert min(count.ready for count in result.counts) == 2
    assert max(count.total for count in result.counts) == 3
    ready_s = [count.at_s for count in result.counts if count.ready == 3][1:]
    stops_s = [count.at_s for count in result.counts if count.ready == 2]
    assert len(ready_s) >= 2
    assert ready_s[0] >= 15.0
    assert pytest.approx(ready_s[0] + 5.0) in stops_s


def test_a_drain_that_is_too_short_cuts_answers() -> None:
    load = load_of((1.0, prompt(0), 500))
    for drain_s, is_cut in ((1.0, True), (10.0, False)):
        plan = STILL._replace(replicas=2, rollouts_s=(2.0,), drain_s=drain_s)
        [answer] = run(load, plan).answers
        assert bool(answer.error) == is_cut


def test_the_autoscaler_adds_replicas_after_window_and_start_and_removes_them_later() -> None:
    """40 requests wait from 1 s on, so the wish for 4 replicas is at the first sync, 15 s.

    The initial recommendation of one replica leaves the window of 60 s at 75 s. One replica may
    then become two, and after another 60 s four. A start takes 10 s.
    """
    requests = [(1.0 + index / 8, prompt(index), 60) for index in range(160)]
    late = [(900.0, prompt(1000), 1)]
    plan = STILL._replace(autoscaler=Autoscaler(1, 4))
    result = run(load_of(*requests, *late), plan, LeastLoad(0), step_s=0.2)
    growth = {count.total: count.at_s for count in reversed(result.counts) if count.at_s < 300}
    assert [growth[n] for n in (1, 2, 4)] == [0.0, 75.0, 135.0]
    assert {count.at_s for count in result.counts if count.ready == 2} >= {85.0}
    shrink = [(count.at_s, count.total) for count in result.counts if count.at_s > 300]
    assert [total for _, total in shrink] == [3, 2, 1]
    assert np.diff([at_s for at_s, _ in shrink]).min() >= 60.0
    assert not any(answer.error for answer in result.answers)


def test_idle_replicas_do_not_change_the_answers() -> None:
    load = load_of((0.0, prompt(0), 20), (0.05, prompt(0), 20))
    alone = run(load, STILL).answers
    many = run(load, STILL._replace(replicas=64), make_router("precise", 16, 1000, 0)).answers
    assert many[0].outputs_s == alone[0].outputs_s
