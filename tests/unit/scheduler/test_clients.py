"""Clients take turns: prompt tokens, and room for a client within its share."""

import numpy as np
import pytest

from bench.simulate import simulate
from minisgl.benchmark.trace import Load
from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, VirtualEngine, read_cost
from minisgl.core import SchedulerConfig
from minisgl.core.batch import Batch
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_of


def test_the_choices_of_a_prompt_are_requests_of_their_own() -> None:
    """They share one copy of the prompt, and draw with different seeds."""
    harness = Harness(FakeEngine(64, 4, max_seq_len=64), config())
    uid = harness.add(prompt_of(9), count=3, max_tokens=4, ignore_eos=True, seed=2**63 - 1)
    harness.step()
    reqs = [harness.scheduler._reqs[each] for each in range(uid, uid + 3)]
    assert [req.sampling.seed for req in reqs] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert all(np.shares_memory(reqs[1].tokens, req.tokens) for req in reqs[2:])
    harness.run()
    for each in range(uid, uid + 3):
        assert harness.answers[each].tokens == expected_output(prompt_of(9), 4, ignore_eos=True)


def test_a_refused_message_ends_each_of_its_requests_once() -> None:
    harness = Harness(FakeEngine(64, 4, max_seq_len=64), config())
    uid = harness.add([10**6], count=3)
    harness.run()
    assert [len(harness.answers[each].finishes) for each in range(uid, uid + 3)] == [1, 1, 1]


def first_step_of(harness: Harness, engine: FakeEngine, uid: int, steps: int = 50) -> int:
    """Run until the request has its first token. Returns the number of launched steps."""
    before = len(engine.batches)
    for _ in range(steps):
        harness.step()
        if harness.answers[uid].tokens:
            return len(engine.batches) - before
    raise AssertionError("the request was not served")


@pytest.mark.parametrize("hostile_choices", [8, 800])
def test_a_short_request_passes_a_long_queue_of_another_client(hostile_choices: int) -> None:
    """Its first token takes the same number of steps behind 8 and behind 800 other requests."""
    engine = FakeEngine(4096, 4, max_running_reqs=8, max_seq_len=512)
    harness = Harness(engine, config())
    for call in range(1, 9):
        harness.add(
            prompt_of(40, call),
            client="hostile",
            call=call,
            count=hostile_choices // 8,
            max_tokens=400,
            ignore_eos=True,
        )
    for _ in range(5):
        harness.step()
    uid = harness.add(prompt_of(20, 99), client="other", call=9, max_tokens=2, ignore_eos=True)
    assert first_step_of(harness, engine, uid) <= 4
    assert harness.scheduler.totals.preemptions_total == 1, "one row was enough"


def test_a_long_prompt_of_one_client_leaves_half_of_each_step_to_another_one() -> None:
    engine = FakeEngine(4096, 4, max_running_reqs=8, max_seq_len=4000)
    harness = Harness(engine, config(prefill_budget_tokens=40))
    harness.add(prompt_of(3000), client="hostile", call=1, max_tokens=2)
    harness.step()
    uid = harness.add(prompt_of(20, 9), client="other", call=2, max_tokens=2, ignore_eos=True)
    harness.step()
    assert sorted(engine.batches[-1].lengths.tolist()) == [20, 20]
    assert first_step_of(harness, engine, uid) <= 1


def test_pages_are_taken_from_the_client_that_holds_most() -> None:
    """When the streams of both clients grow, the newest stream of the larger client waits."""
    engine = FakeEngine(40, 4, max_running_reqs=8, max_seq_len=160)
    harness = Harness(engine, config(cache_type="naive"))
    hostile = [
        harness.add(prompt_of(16, i), client="hostile", call=i, max_tokens=60, ignore_eos=True)
        for i in range(1, 7)
    ]
    for _ in range(3):
        harness.step()
    other = harness.add(prompt_of(8, 9), client="other", call=9, max_tokens=40, ignore_eos=True)
    preempted = set()
    while not harness.answers[other].finishes:
        harness.step()
        preempted |= {r.client for r in harness.scheduler.view.waiting if r.admitted}
    assert preempted == {"hostile"}
    harness.run()
    for index, uid in enumerate(hostile, 1):
        wanted = expected_output(prompt_of(16, index), 60, ignore_eos=True)
        assert harness.answers[uid].tokens == wanted


def test_a_client_alone_uses_all_rows() -> None:
    engine = FakeEngine(4096, 4, max_running_reqs=8, max_seq_len=512)
    harness = Harness(engine, config())
    harness.add(prompt_of(9), client="other", max_tokens=2)
    harness.run()
    for call in range(1, 20):
        harness.add(prompt_of(9, call), client="a", call=call, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        harness.step()
    assert len(engine.batches[-1].rows) == 8
    harness.run()
    assert harness.scheduler.totals.preemptions_total == 0


def test_a_client_above_its_share_loses_a_row_to_another_one() -> None:
    engine = FakeEngine(4096, 4, max_running_reqs=2, max_seq_len=512)
    harness = Harness(engine, config())
    first, second = (
        harness.add(prompt_of(9, call), client="a", call=call, max_tokens=30, ignore_eos=True)
        for call in (1, 2)
    )
    for _ in range(4):
        harness.step()
    other, later = (
        harness.add(prompt_of(9, call), client="b", call=call, max_tokens=60, ignore_eos=True)
        for call in (3, 4)
    )
    while not harness.answers[first].finishes:
        harness.step()
        assert not harness.answers[later].tokens, "the client has a row, which is its share"
    assert harness.answers[other].tokens
    assert not harness.answers[second].finishes, "the newest request was preempted"
    assert harness.scheduler.totals.preemptions_total == 1
    harness.run()


def test_the_last_running_request_of_a_client_keeps_pages_above_its_share() -> None:
    engine = FakeEngine(40, 4, max_running_reqs=4, max_seq_len=160)
    harness = Harness(engine, config(cache_type="naive"))
    large = harness.add(prompt_of(110, 1), client="a", call=1, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        harness.step()
    other = harness.add(prompt_of(60, 2), client="b", call=2, max_tokens=4, ignore_eos=True)
    while not harness.answers[large].finishes:
        harness.step()
        assert harness.scheduler.totals.preemptions_total == 0
    assert not harness.answers[other].tokens
    harness.run()


class CountingEngine(VirtualEngine):
    """Records the requests and the prompt tokens of each step."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(read_cost(DEFAULT_COST), 20_000, 256, 16_384))
        self.launched_s: list[float] = []

    def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
        self.launched_s.append(self.now_s)
        return super().launch(batch)


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(256, 1000), (8000, 4), (1000, 300)])
def test_simulated_overload_delays_another_client_by_few_steps(
    prompt_tokens: int, output_tokens: int
) -> None:
    """One client has 400 requests open, more than the rows, and the other one has eight.

    Costs of an 8B model on one H200. At most three steps start between the arrival of the other
    client's request and its first token: one makes room, one computes its prompt, and one starts
    before the result of the second is read.
    """
    hostile = [(0.001 * i, prompt_tokens, output_tokens, "hostile") for i in range(400)]
    other = [(5 + 0.7771 * i, 256, 8, "other") for i in range(8)]
    reqs = sorted([*hostile, *other, (0.0, 16, 1, "other")])
    prompts = [
        np.random.default_rng(i).integers(0, 10_000, size, dtype=np.int32)
        for i, (_, size, _, _) in enumerate(reqs)
    ]
    load = Load(prompts, [r[2] for r in reqs], [r[0] for r in reqs], [r[3] for r in reqs])
    engine = CountingEngine()
    cost = read_cost(DEFAULT_COST)
    answers = simulate(load, engine, cost, SchedulerConfig(), 1)
    started = np.array(engine.launched_s)
    steps = [
        int(((started > answer.sent_s) & (started < answer.outputs_s[0])).sum())
        for answer, req in zip(answers, reqs, strict=True)
        if req[3] == "other" and req[0] > 0
    ]
    assert max(steps) <= 3
