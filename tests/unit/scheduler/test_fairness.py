"""No request waits forever because of requests that arrive later."""

import pytest

from minisgl.kvcache.memory import Memory
from minisgl.scheduler.filling import MAX_DEFERRED
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_of

BROKEN = 63  # prompts with this id have non-finite logits; other prompts have ids below it
SHARED = [token % 62 + 1 for token in prompt_of(150)]


def test_a_request_does_not_wait_for_newer_requests_that_share_its_prefix_and_fail() -> None:
    """Regression: newer requests were admitted one after another, and the old one never ran."""
    engine = FakeEngine(4096, 4, max_seq_len=1024)
    engine.break_prompts_with = BROKEN
    harness = Harness(engine, config(prefill_budget_tokens=400))

    def add_failing(i: int) -> int:
        """Add a request whose shared prefix is too short to wait for others."""
        own = [(3 * i + k * (i + 1)) % 60 + 1 for k in range(439)]
        return harness.add([*SHARED, *own, BROKEN])

    failing = [add_failing(0)]
    harness.step()
    prompt = SHARED + [5] * 30
    patient = harness.add(prompt, max_tokens=2, ignore_eos=True)
    for i in range(1, 60):
        failing.append(add_failing(i))
        harness.step()
    assert harness.answers[patient].tokens == expected_output(prompt, 2, ignore_eos=True)
    ends = [harness.answers[uid].finishes for uid in failing]
    assert sum(map(len, ends)) > 20
    assert not harness.scheduler.idle, "more requests are queued"


@pytest.mark.parametrize("page_size", [64, 128])
def test_siblings_wait_for_whole_pages_only(page_size: int) -> None:
    """Regression: with a page larger than the prompt, each request waited for the previous one."""
    engine = FakeEngine(64, page_size, max_running_reqs=16, max_seq_len=256)
    harness = Harness(engine, config())
    uids = [harness.add(prompt_of(120), max_tokens=2, ignore_eos=True) for _ in range(8)]
    harness.run()
    prefilled = [len(batch.rows) for batch in engine.batches if len(batch.chunk_ids)]
    assert prefilled == ([1, 7] if page_size == 64 else [8])
    for uid in uids:
        assert harness.answers[uid].tokens == expected_output(prompt_of(120), 2, ignore_eos=True)


def test_a_prompt_is_admitted_when_the_running_requests_can_still_grow() -> None:
    """Regression: a prompt took a page that a stream needed next, and was preempted at once."""
    harness = Harness(FakeEngine(16, 4, max_seq_len=64), config(cache_type="naive"))
    streams = [harness.add(prompt_of(7, i), max_tokens=9, ignore_eos=True) for i in range(4)]
    harness.step()
    late = harness.add(prompt_of(23, 9), max_tokens=4, ignore_eos=True)
    harness.run()
    totals = harness.scheduler.totals
    assert totals.preemptions_total == 0
    assert totals.prefill_tokens_total == 4 * 7 + 23
    for i, uid in enumerate(streams):
        assert harness.answers[uid].tokens == expected_output(prompt_of(7, i), 9, ignore_eos=True)
    assert harness.answers[late].tokens == expected_output(prompt_of(23, 9), 4, ignore_eos=True)


def test_one_plan_skips_64_requests_of_a_client_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 200 requests wait for the prefix that the step in flight computes."""
    harness = Harness(FakeEngine(4096, 4, 256, 1024), config(prefill_budget_tokens=1024))
    shared = prompt_of(512)
    harness.add(shared, max_tokens=4, ignore_eos=True)
    harness.step()
    for own in range(200):
        harness.add([*shared, own % 60 + 1, 7, own % 50 + 1], max_tokens=1)
    looked_up: list[int] = []
    find = Memory.hit
    monkeypatch.setattr(
        Memory, "hit", lambda self, req: looked_up.append(req.uid) or find(self, req)
    )
    harness.step()
    assert len(looked_up) == MAX_DEFERRED
    assert len(harness.scheduler.view.waiting) == 200
