"""Requests with a constraint: preparation, failures and forced tokens."""

from pathlib import Path
from typing import Any

import pytest

from minisgl.core import FinishReason, SchedulerConfig
from minisgl.message.messages import LeaderStep, Prepared
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.scheduler.inbox import FollowerInbox, LocalInbox
from minisgl.scheduler.preparation import MAX_AHEAD
from minisgl.scheduler.request import ReqState
from minisgl.utils.process import write_socket_key
from tests.unit.scheduler.drafts import DRAFTERS, ChangingDrafts
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_cached_slots

PROMPT = [5, 6, 7]


def harness(**settings: Any) -> Harness:
    return Harness(FakeEngine(64, 4), SchedulerConfig(**{"target_step_ms": None} | settings))


def scripted(harness: Harness, max_tokens: int = 12, **params: Any) -> tuple[int, list[int]]:
    """Add a request with a constraint; return its uid and the output of the plain computation.

    params: of Harness.add or ScriptedParams.
    """
    output = expected_output(PROMPT, max_tokens, ignore_eos=True)
    script = {"script": tuple(output), "prompt_len": len(PROMPT)}
    asked = {"max_tokens": max_tokens, "ignore_eos": True} | script | params
    return harness.add(PROMPT, **asked), output


def test_a_request_waits_outside_of_the_queue_until_its_constraint_is_prepared() -> None:
    h = harness()
    slow, output = scripted(h, polls=6)
    plain = h.add([9, 8], max_tokens=3, ignore_eos=True)
    h.step()
    assert h.scheduler._reqs[slow].state is ReqState.PREPARING
    assert h.scheduler.stats().waiting_reqs == 1
    assert not h.scheduler.idle
    for _ in range(4):
        h.step()
    assert h.answers[plain].finishes == [FinishReason.LENGTH], "the other request is not delayed"
    assert not h.answers[slow].tokens
    h.run()
    assert h.answers[slow].tokens == output


def test_a_preparing_request_can_be_aborted() -> None:
    h = harness()
    uid, _ = scripted(h, polls=5)
    h.step()
    h.abort(uid)
    h.run()
    assert h.answers[uid].finishes == [FinishReason.ABORT]
    h.inbox.messages.append(Prepared(uids=[uid]))  # the leader's message of the same iteration
    h.step()
    assert h.scheduler.idle


def test_a_failed_preparation_ends_its_request_with_its_error() -> None:
    h = harness()
    uid, _ = scripted(h, broken=True)
    other = h.add(PROMPT, max_tokens=2, ignore_eos=True)
    h.step()
    finished = []
    h.scheduler._results._send = lambda output: finished.extend(output.finished)
    for _ in range(6):
        h.scheduler.iterate()
    reasons = {f.uid: (f.reason, f.error, f.error_kind) for f in finished}
    assert reasons[uid] == (FinishReason.ERROR, "the script is broken", "GrammarFailed")
    assert reasons[other][0] is FinishReason.LENGTH
    assert h.scheduler.totals.constraints.failures == {"broken": 1}
    assert h.scheduler.totals.nonfinite_rows_total == 0


def test_a_row_without_an_allowed_token_ends_with_the_constraint_s_error() -> None:
    h = harness()
    uid, _ = scripted(h)
    h.step()
    h.engine.break_prompts_with = PROMPT[-1]
    constraint = h.scheduler._reqs[uid].constraint
    h.step()
    constraint.params = constraint.params.__class__(  # the grammar fails at the first token
        prompt_len=3, script=constraint.params.script, broken=True
    )
    h.run()
    assert h.answers[uid].finishes == [FinishReason.ERROR]
    assert h.answers[uid].error == "the script is broken"
    assert h.scheduler.totals.nonfinite_rows_total == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_without_a_token_is_prepared_again_and_goes_on(overlap: bool) -> None:
    """An engine withholds a row whose mask is not ready. Its logits are then not finite."""
    h = harness(overlap=overlap)
    uid, output = scripted(h, polls=3)
    other = h.add([30, 31], max_tokens=12, ignore_eos=True)
    req = withhold(h, uid, output[3])
    given = len(h.answers[other].tokens)
    h.step()
    assert req.state is ReqState.PREPARING
    assert h.answers[uid].tokens == output[:4]
    assert len(h.answers[other].tokens) > given, "the other request is not delayed"
    h.run()
    assert h.answers[uid].tokens == output
    assert req.constraint.preparations == [len(PROMPT) + 4]
    totals = h.scheduler.totals
    assert (totals.preemptions_total, totals.nonfinite_rows_total) == (0, 0)
    check_cached_slots(h.scheduler.memory.tree, h.engine)


def withhold(h: Harness, uid: int, token: int) -> Any:
    """Run until the step that forwards `token` has given no token. Returns the request."""
    h.engine.break_prompts_with = token
    req = None
    while req is None or not req.constraint.preparations:
        h.step()
        req = h.scheduler._reqs[uid]
    h.engine.break_prompts_with = None
    return req


def test_a_prepared_request_without_a_token_ends() -> None:
    """The mask is ready, so the logits of the model are not finite."""
    h = harness()
    uid, output = scripted(h)
    h.engine.break_prompts_with = output[3]
    h.run()
    assert h.answers[uid].tokens == output[:4]
    assert h.answers[uid].error == "the model produced non-finite logits"
    assert h.scheduler.totals.nonfinite_rows_total == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_with_slow_edits_pauses_after_each_token(overlap: bool) -> None:
    """Regression: it was preempted for each token, and computed a part of its tokens again."""
    h = harness(overlap=overlap)
    uid, output = scripted(h, polls=3, slow=True)
    other = h.add([30, 31], max_tokens=60, ignore_eos=True)
    req = paused(h, uid)
    computed, row = h.scheduler.totals.prefill_tokens_total, req.row
    assert h.scheduler.stats().running_reqs == 2
    given = len(h.answers[other].tokens)
    h.step()
    assert len(h.answers[other].tokens) > given, "the other request is not delayed"
    assert req.row == row
    h.run()
    assert h.answers[uid].tokens == output
    assert h.answers[other].tokens == expected_output([30, 31], 60, ignore_eos=True)
    assert req.constraint.preparations == [len(PROMPT) + n for n in range(1, len(output))]
    assert h.scheduler.totals.prefill_tokens_total == computed
    check_cached_slots(h.scheduler.memory.tree, h.engine)


def test_a_request_with_slow_edits_does_not_pause_before_its_last_chunk() -> None:
    """Regression: the result of an earlier chunk paused it, with the last chunk in flight.

    The step of the earlier chunk had another request with a constraint. The paused request then
    ended twice, which ended the scheduler.
    """
    h = Harness(FakeEngine(64, 4), SchedulerConfig(prefill_budget_tokens=1))
    scripted(h, max_tokens=40)
    while not h.answers:
        h.step()
    uid, output = scripted(h, polls=3, slow=True)
    h.step()
    constraint = h.scheduler._reqs[uid].constraint
    h.run()
    assert h.answers[uid].tokens == output
    assert constraint.preparations == [len(PROMPT) + n for n in range(1, len(output))]


def paused(h: Harness, uid: int) -> Any:
    """Run until the request is paused, and return it."""
    while not h.scheduler.view.paused:
        h.step()
    return h.scheduler._reqs[uid]


def test_a_paused_request_can_be_aborted_and_can_fail() -> None:
    for most, finish in ((10**9, FinishReason.ABORT), (3, FinishReason.ERROR)):
        h = harness()
        uid, _ = scripted(h, polls=3, slow=True, most_preparations=most)
        paused(h, uid)
        if finish is FinishReason.ABORT:
            h.abort(uid)
        h.run()
        assert h.answers[uid].finishes == [finish]
        assert not h.scheduler.view.paused


def test_a_paused_request_is_preempted_for_pages() -> None:
    """A pool of 7 pages of 4 tokens. The request of the first priority needs all of them."""
    h = Harness(FakeEngine(7, 4), SchedulerConfig(target_step_ms=None))
    uid, output = scripted(h, polls=40, slow=True, priority=1)
    paused(h, uid)
    other = h.add([30, 31], max_tokens=26, ignore_eos=True)
    h.run()
    assert h.answers[uid].tokens == output
    assert h.answers[other].tokens == expected_output([30, 31], 26, ignore_eos=True)
    assert h.scheduler.totals.preemptions_total > 0


def test_one_short_preparation_of_a_client_takes_place_at_the_arrival() -> None:
    """Regression: it took an iteration more, and a step of other requests delayed it."""
    h = harness()
    first = scripted(h, client="a", call=1, polls=9, start_s=0.001)[0]
    others = [scripted(h, client=c, polls=9, start_s=s)[0] for c, s in (("a", 0.001), ("b", 1.0))]
    broken = scripted(h, client="c", broken=True, start_s=0.001)[0]
    h.step()
    states = [h.scheduler._reqs[uid].state for uid in (first, *others)]
    assert states == [ReqState.DECODE, ReqState.PREPARING, ReqState.PREPARING]
    h.run()
    assert h.answers[broken].error == "the script is broken"
    assert all(h.answers[uid].finishes == [FinishReason.LENGTH] for uid in (first, *others))


def test_preparations_that_take_too_long_end_the_request() -> None:
    h = harness()
    uid, output = scripted(h, most_preparations=0)
    withhold(h, uid, output[3])
    h.run()
    assert h.answers[uid].finishes == [FinishReason.ERROR]
    assert h.answers[uid].error == "the script takes too long"
    assert h.scheduler.totals.constraints.failures == {"slow": 1}


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_take_one_step_instead_of_one_each(overlap: bool) -> None:
    launched = {}
    for stretch in (0, 6):
        h = harness(overlap=overlap)
        uid, output = scripted(h, max_tokens=30, stretch=stretch)
        h.run()
        assert h.answers[uid].tokens == output
        launched[stretch] = len(h.engine.batches)
        forced = h.scheduler.totals.constraints.forced_tokens
        assert (forced > 0) == (stretch > 0)
    assert launched[6] < launched[0] - 5


def test_a_request_for_logprobs_gets_no_forced_tokens() -> None:
    h = harness()
    uid, output = scripted(h, max_tokens=30, stretch=6, logprobs=0)
    h.run()
    assert h.answers[uid].tokens == output
    assert h.scheduler.totals.constraints.forced_tokens == 0


def test_one_short_chunk_does_not_slow_many_streams_down() -> None:
    """A chunk of a few tokens saves less than it costs when it makes the step of 30 rows mixed."""
    h = Harness(FakeEngine(400, 4, max_running_reqs=40), SchedulerConfig(target_step_ms=None))
    for seed in range(30):
        h.add([seed + 1, 3], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        h.step()
    uid, output = scripted(h, max_tokens=20, stretch=4)
    h.run()
    assert h.answers[uid].tokens == output
    assert h.scheduler.totals.constraints.forced_tokens <= 4, "only those that end the request"


def test_every_rank_gets_the_own_messages_of_rank_0(tmp_path: Path) -> None:
    write_socket_key(str(tmp_path))
    address = endpoint(str(tmp_path), "rank-1")
    follower = FollowerInbox(Receiver(address, LeaderStep))
    leader = LocalInbox([Sender(address)])
    expected = [Prepared(uids=[4, 7], failed=[7])]
    assert list(leader.receive(lambda: 0.0, None, expected)) == expected
    assert list(follower.receive(lambda: 0.0, None, [Prepared(uids=[9])])) == expected
    assert list(leader.receive(lambda: 0.0, None, [])) == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_forced_tokens_follow_the_last_accepted_token(drafter: str, overlap: bool) -> None:
    """Drafts of the step in flight may reach beyond the forced tokens; its result is dropped."""
    engine = FakeEngine(128, 4, drafter=DRAFTERS[drafter])
    config = SchedulerConfig(target_step_ms=None, overlap=overlap)
    drafts = ChangingDrafts(7, changing=False)
    h = Harness(engine, config, drafts=drafts)
    added = [scripted(h, max_tokens=30 + stretch, stretch=stretch) for stretch in range(8)]
    h.run()
    for uid, output in added:
        assert h.answers[uid].tokens == output
    assert h.scheduler.totals.constraints.forced_tokens > 20
    assert drafts.drafted > 20
    check_cached_slots(h.scheduler.memory.tree, engine)


def test_drafts_of_a_dropped_result_do_not_count() -> None:
    """All drafts are right: a step whose result is kept gives a row its drafts and one token."""
    drafts = ChangingDrafts(7, changing=False)
    engine = FakeEngine(64, 4, drafter=DRAFTERS["right"])
    h = Harness(engine, SchedulerConfig(target_step_ms=None), drafts=drafts)
    uid, output = scripted(h, max_tokens=60, stretch=5)
    h.run()
    assert h.answers[uid].tokens == output
    totals = h.scheduler.totals
    sampled = len(output) - totals.constraints.forced_tokens
    assert 0 < drafts.agreed < sampled
    assert sum(totals.drafts.accepted) == drafts.agreed


def started(harness: Harness) -> list[int]:
    """The uids of the open requests whose preparation has begun."""
    reqs = harness.scheduler._reqs
    return [
        uid for uid, req in reqs.items() if req.constraint and req.constraint.client is not None
    ]


def test_few_preparations_of_a_client_begin_before_its_requests_run() -> None:
    """Regression: a call with n = 1,000 compiled 1,000 grammars at once, before those of others."""
    h = harness()
    first, _ = scripted(h, polls=10**6, count=1000, client="a", call=1)
    h.step()
    assert started(h) == [*range(first, first + MAX_AHEAD)]
    other, output = scripted(h, client="b", call=2)
    h.step()
    assert started(h) == [*range(first, first + MAX_AHEAD), other]
    for _ in range(30):
        h.step()
    assert h.answers[other].tokens == output
    for uid in range(first, first + 1000):
        h.abort(uid)
    h.run()
    assert h.scheduler.idle


def test_preparations_begin_in_the_place_of_requests_that_run_or_end() -> None:
    h = harness()
    uids = [scripted(h, max_tokens=3, count=50, client="a", call=call)[0] for call in (1, 2)]
    h.run()
    for uid in uids:
        assert all(h.answers[uid + index].finishes for index in range(50))


def test_calls_of_a_client_take_turns_and_priorities_do_not_wait_for_each_other() -> None:
    h = harness()
    many, _ = scripted(h, polls=10**6, count=100, call=1)
    few, _ = scripted(h, polls=10**6, count=2, call=2)
    urgent, _ = scripted(h, polls=10**6, call=3, priority=-1)
    h.step()
    assert urgent in started(h)
    assert few not in started(h)
    for uid in range(many, many + 2):
        h.abort(uid)
    h.step()
    h.step()
    assert few in started(h)


def test_an_abort_withdraws_the_preparation() -> None:
    h = harness()
    uid, _ = scripted(h, polls=10**6)
    h.step()
    constraint = h.scheduler._reqs[uid].constraint
    h.abort(uid)
    h.step()
    assert constraint.withdrawn


def test_the_preparation_of_an_aborted_request_does_not_begin() -> None:
    h = harness()
    first, _ = scripted(h, polls=10**6, count=MAX_AHEAD + 3, client="a", call=1)
    h.step()
    h.abort(first + MAX_AHEAD)
    h.step()
    h.abort(first)
    h.step()
    h.step()
    assert [uid - first - MAX_AHEAD for uid in started(h)][-1] == 1


def test_a_scheduler_with_preparing_requests_only_tells_that_no_step_is_due() -> None:
    h = harness()
    uid, _ = scripted(h, polls=10**6)
    assert not h.scheduler.stats().preparing
    h.step()
    assert h.scheduler.stats().preparing
    plain = h.add(PROMPT, max_tokens=50, ignore_eos=True)
    h.step()
    assert not h.scheduler.stats().preparing
    h.abort(uid)
    h.abort(plain)
    h.run()
    assert not h.scheduler.stats().preparing
