"""Requests with a lower priority number come first, and no request waits forever."""

import pytest

from minisgl.core import StepCost
from minisgl.scheduler import scheduler
from minisgl.scheduler.plan import MAX_PAUSES
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_of

PRIORITIES = [5, 0, -1, 5, 0, -1]


def order_of_first_tokens(harness: Harness) -> list[int]:
    """Run until idle, and return the uids in the order of their first tokens."""
    order: list[int] = []
    while not harness.scheduler.idle or harness.inbox.messages:
        harness.step()
        order += [uid for uid, a in harness.answers.items() if a.tokens and uid not in order]
    return order


def test_waiting_requests_are_served_by_priority_then_by_arrival() -> None:
    harness = Harness(FakeEngine(256, 4, max_running_reqs=1, max_seq_len=64), config())
    uids = [
        harness.add(prompt_of(9, i), max_tokens=2, ignore_eos=True, priority=priority)
        for i, priority in enumerate(PRIORITIES)
    ]
    order = order_of_first_tokens(harness)
    ranked = sorted(range(6), key=lambda i: (PRIORITIES[i], i))
    assert order == [uids[i] for i in ranked]


def test_within_one_priority_the_clients_take_turns() -> None:
    harness = Harness(FakeEngine(256, 4, max_running_reqs=2, max_seq_len=64), config())
    flood = [harness.add(prompt_of(9, i), client="flood", priority=1) for i in range(6)]
    other = harness.add(prompt_of(9, 8), client="other", priority=1)
    urgent = harness.add(prompt_of(9, 9), client="flood", priority=0)
    order = order_of_first_tokens(harness)
    assert order.index(urgent) < 2
    assert order.index(other) < order.index(flood[1])


def test_a_request_takes_the_row_of_the_newest_request_of_the_last_priority() -> None:
    harness = Harness(FakeEngine(256, 4, max_running_reqs=3, max_seq_len=64), config())
    low = [harness.add(prompt_of(9, i), max_tokens=20, ignore_eos=True, priority=1) for i in (1, 2)]
    lowest = harness.add(prompt_of(9, 3), max_tokens=20, ignore_eos=True, priority=2)
    for _ in range(4):
        harness.step()
    before = len(harness.answers[lowest].tokens)
    urgent = harness.add(prompt_of(9, 4), max_tokens=4, ignore_eos=True)
    while not harness.answers[urgent].tokens:
        harness.step()
    assert harness.scheduler.totals.preemptions_total == 1
    assert len(harness.answers[lowest].tokens) <= before + 3, "the lowest request was preempted"
    harness.run()
    for uid, seed in zip([*low, lowest], (1, 2, 3), strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt_of(9, seed), 20, True)


def order_of_ends(harness: Harness) -> list[int]:
    """Run until idle, and return the uids in the order of their ends."""
    order: list[int] = []
    while not harness.scheduler.idle or harness.inbox.messages:
        harness.step()
        order += [uid for uid, a in harness.answers.items() if a.finishes and uid not in order]
    return order


def test_a_request_takes_the_pages_of_requests_of_a_later_priority() -> None:
    harness = Harness(FakeEngine(16, 4, max_seq_len=64), config())
    low = [
        harness.add(prompt_of(12, i), max_tokens=20, ignore_eos=True, priority=9) for i in (1, 2)
    ]
    for _ in range(3):
        harness.step()
    urgent = harness.add(prompt_of(40, 3), max_tokens=2, ignore_eos=True)
    assert order_of_ends(harness) == [urgent, *low]
    assert harness.scheduler.totals.preemptions_total >= 1
    assert harness.answers[urgent].tokens == expected_output(prompt_of(40, 3), 2, True)
    for uid, seed in zip(low, (1, 2), strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt_of(12, seed), 20, True)


def test_short_pages_are_taken_from_the_last_priority_and_not_from_the_newest_request() -> None:
    engine = FakeEngine(16, 4, max_seq_len=64)
    harness = Harness(engine, config())
    low = harness.add(prompt_of(20, 1), max_tokens=30, ignore_eos=True, priority=3)
    harness.step()
    urgent = harness.add(prompt_of(20, 2), max_tokens=30, ignore_eos=True)
    assert order_of_ends(harness) == [urgent, low]
    assert harness.scheduler.totals.preemptions_total == 1


def test_chunks_go_to_the_first_priority() -> None:
    engine = FakeEngine(256, 4, max_running_reqs=4, max_seq_len=512)
    harness = Harness(engine, config(prefill_budget_tokens=32))
    low = harness.add(prompt_of(200, 1), max_tokens=2, ignore_eos=True, priority=1)
    harness.step()
    urgent = harness.add(prompt_of(60, 2), max_tokens=2, ignore_eos=True)
    steps = 0
    while not harness.answers[urgent].tokens:
        harness.step()
        steps += 1
    assert steps <= 4, "its two chunks come before those of the older request"
    assert not harness.answers[low].tokens
    harness.run()


def test_requests_of_a_later_priority_do_not_take_the_room_that_a_request_waits_for() -> None:
    """The small requests would fit at once. The large one would then wait for all of them."""
    harness = Harness(FakeEngine(16, 4, max_seq_len=64), config())
    running = harness.add(prompt_of(24, 0), max_tokens=8, ignore_eos=True)
    harness.step()
    large = harness.add(prompt_of(48, 1), max_tokens=4, ignore_eos=True)
    small = [harness.add(prompt_of(5, i), priority=1, max_tokens=4) for i in range(2, 6)]
    order = order_of_first_tokens(harness)
    assert order[:2] == [running, large]
    assert set(order[2:]) == set(small)


def test_an_old_request_comes_first_after_many_were_served_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_OVERTAKES", 5)
    harness = Harness(FakeEngine(256, 4, max_running_reqs=1, max_seq_len=64), config())
    patient = [
        harness.add(prompt_of(9, i), max_tokens=2, ignore_eos=True, priority=7) for i in (0, 1)
    ]
    served = 0
    for i in range(40):  # there is always an urgent request in the queue
        urgent = harness.add(prompt_of(9, 10 + i), max_tokens=2, ignore_eos=True)
        while not harness.answers[urgent].tokens and not harness.answers[patient[1]].tokens:
            harness.step()
        served += bool(harness.answers[urgent].tokens)
        if harness.answers[patient[1]].tokens:
            break
    assert 10 <= served <= 14, "one old request for every five that overtook it"
    assert harness.answers[patient[0]].finishes
    harness.run()


def test_an_admitted_prompt_is_computed_although_earlier_priorities_use_up_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows and pages suffice, so the request is not preempted and never waits again."""
    monkeypatch.setattr(scheduler, "MAX_OVERTAKES", 5)
    engine = FakeEngine(4096, 4, max_running_reqs=64, max_seq_len=512)
    harness = Harness(engine, config(prefill_budget_tokens=32))
    patient = harness.add(prompt_of(200, 0), max_tokens=2, ignore_eos=True, priority=7)
    harness.step()
    steps = 0
    while not harness.answers[patient].tokens and steps < 100:
        harness.add(prompt_of(40, 10 + steps), max_tokens=2, ignore_eos=True)
        harness.step()
        steps += 1
    assert 5 < steps < 30
    harness.run()


def test_prompts_of_an_earlier_priority_leave_a_stream_out_of_a_few_steps_in_a_row() -> None:
    engine = FakeEngine(4096, 4, max_running_reqs=64, max_seq_len=512)
    harness = Harness(engine, config(prefill_budget_tokens=16, overlap=False))
    stream = harness.add(prompt_of(9, 0), max_tokens=40, ignore_eos=True, priority=1)
    while not harness.answers[stream].tokens:
        harness.step()
    begun = len(engine.batches)
    harness.add(prompt_of(400, 1), max_tokens=2, ignore_eos=True)  # in 25 steps
    for _ in range(3 * (MAX_PAUSES + 1)):
        harness.step()
    has_stream = [batch.num_decode > 0 for batch in engine.batches[begun:]]
    period = [False] * MAX_PAUSES + [True]
    assert has_stream[: 2 * len(period)] == period * 2
    harness.run()


def test_a_step_after_the_pauses_has_the_budget_beside_all_streams() -> None:
    """Regression: its prompt tokens filled the limit of a step without the streams, which ran too.

    The streams take 5 ms of a step, and a prompt token 0.1 ms.
    """
    engine = FakeEngine(4096, 4, max_running_reqs=64, max_seq_len=512)
    harness = Harness(engine, config(target_step_ms=20.0, overlap=False))
    streams = [
        harness.add(prompt_of(50, i), max_tokens=40, ignore_eos=True, priority=1) for i in range(2)
    ]
    while not all(harness.answers[uid].tokens for uid in streams):
        harness.step()
    cost = StepCost(
        tokens=(1, 1001), seconds=(0.0001, 0.1001), per_decode_key_s=5e-5, per_prefill_pair_s=0.0
    )
    harness.scheduler.view.cost = cost
    begun = len(engine.batches)
    for i in range(6):
        harness.add(prompt_of(400, 2 + i), max_tokens=1)
    for _ in range(MAX_PAUSES + 1):
        harness.step()
    *paused, last = engine.batches[begun:]
    assert {batch.num_decode for batch in paused} == {0}
    assert last.num_decode == 2
    assert len(last.chunk_ids) > 32
    assert max(cost.predict_s(batch.work()) for batch in [*paused, last]) <= 0.02
    harness.run()


def test_a_long_queue_of_a_later_priority_does_not_lengthen_the_steps() -> None:
    """Without priorities, a long queue raises the limit of the step time up to four times."""
    sizes = {}
    for earlier in (-5, 0):  # the priority of a request that has ended
        engine = FakeEngine(4096, 4, max_running_reqs=4, max_seq_len=1024)
        harness = Harness(engine, config(prefill_budget_tokens=512, target_step_ms=10.0))
        harness.scheduler.view.cost = StepCost(
            tokens=(1, 2000), seconds=(0.001, 0.2), per_decode_key_s=0.0, per_prefill_pair_s=0.0
        )
        harness.add(prompt_of(20, 99), max_tokens=1, priority=earlier)
        harness.run()
        harness.add(prompt_of(20, 98), max_tokens=200, ignore_eos=True)
        harness.step()
        for i in range(20):
            harness.add(prompt_of(900, i), max_tokens=1)
        for _ in range(6):
            harness.step()
        sizes[earlier] = max(len(batch.chunk_ids) for batch in engine.batches[-4:])
    assert sizes[-5] < sizes[0] / 2


def test_a_single_priority_other_than_0_plans_as_priority_0() -> None:
    """The plan depends on the order of the numbers and not on their values."""
    plans = []
    for priority in (0, -3):
        engine = FakeEngine(24, 4, max_running_reqs=3, max_seq_len=64)
        harness = Harness(engine, config(prefill_budget_tokens=16))
        for i in range(8):
            harness.add(prompt_of(17, i), max_tokens=9, ignore_eos=True, priority=priority)
        harness.run()
        plans.append([batch.plan_hash() for batch in engine.batches])
    assert plans[0] == plans[1]


def test_a_middle_priority_takes_a_row_of_a_later_one_while_an_earlier_one_is_in_use() -> None:
    """Of 16 rows, one is kept for priority 0, so requests of priority 9 fill the other 15."""
    harness = Harness(FakeEngine(256, 4, max_running_reqs=16, max_seq_len=64), config())
    first = harness.add(prompt_of(9, 99), max_tokens=1)
    harness.run()
    low = [
        harness.add(prompt_of(9, i), max_tokens=40, ignore_eos=True, priority=9) for i in range(15)
    ]
    for _ in range(4):
        harness.step()
    middle = harness.add(prompt_of(9, 50), max_tokens=4, ignore_eos=True, priority=1)
    assert order_of_ends(harness)[:2] == [first, middle]
    assert harness.scheduler.totals.preemptions_total == 1
    for uid, seed in zip(low, range(15), strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt_of(9, seed), 40, True)
