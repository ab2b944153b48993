"""Snapshots of states by scheduler and engine: at a preemption, and where requests part."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.kvcache import states
from minisgl.message.messages import AddReq
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.hybrid_models import save
from tests.parity.models import VOCAB_SIZE, transformers_greedy
from tests.parity.test_scheduler_parity import Recorder
from tests.unit.scheduler.integrity import check_scheduler, states_of

PAGE, TOKENS = 16, 30
IDS = np.random.default_rng(3).integers(3, VOCAB_SIZE, 300).tolist()


class Session:
    """A scheduler and an engine with one row."""

    def __init__(self, path: str) -> None:
        engine = Recorder(make_engine(path, page_size=PAGE, max_running_reqs=1))
        self.inbox, self.outbox = LocalInbox(), deque()
        self.scheduler = Scheduler(
            engine,  # type: ignore[arg-type]
            SchedulerConfig(prefill_budget_tokens=64, target_step_ms=None),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(2,),
            inbox=self.inbox,
            send=self.outbox.append,
        )
        engine.scheduler = self.scheduler
        self.answers: list[list[int]] = []

    def add(self, prompt: list[int], tokens: int, priority: int = 0) -> list[int]:
        """Send a request, and return the list of its tokens, which grows with the steps."""
        ids, uid = np.array(prompt, dtype="<i4").tobytes(), len(self.answers)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        message = AddReq(uid=uid, token_ids=ids, sampling=sampling, priority=priority)
        self.inbox.messages.append(message)
        self.answers.append([])
        return self.answers[-1]

    def step(self) -> None:
        self.scheduler.iterate()
        check_scheduler(self.scheduler)
        while self.outbox:
            output = self.outbox.popleft()
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                self.answers[uid].append(token)

    def run(self) -> None:
        while self.inbox.messages or not self.scheduler.idle:
            self.step()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model; prompts shorter than those of a server leave snapshots."""
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", PAGE)
    monkeypatch.setattr(states, "MIN_BRANCH_TOKENS", PAGE)
    return save("qwen3_5", tmp_path)[1]


def test_a_preempted_request_continues_from_its_snapshot_with_the_same_tokens(path: str) -> None:
    session = Session(path)
    late = session.add(IDS[:50], TOKENS, priority=1)
    while len(late) < 20:
        session.step()
    urgent = session.add(IDS[100:160], 4)
    session.run()
    totals = session.scheduler.totals
    assert totals.preemptions_total == 1
    assert 0 < totals.prefill_tokens_total - 50 - 60 < 2 * PAGE
    assert late == transformers_greedy(path, IDS[:50], TOKENS, guess=late)
    assert urgent == transformers_greedy(path, IDS[100:160], 4, guess=urgent)


def test_the_third_request_of_a_junction_begins_with_its_snapshot(path: str) -> None:
    session = Session(path)
    prompts = [IDS[:55] + IDS[at : at + 30] for at in (100, 150, 200)]
    cached = []
    for prompt in prompts:
        before = session.scheduler.totals.cached_tokens_total
        answer = session.add(prompt, 8)
        session.run()
        cached.append(session.scheduler.totals.cached_tokens_total - before)
        assert answer == transformers_greedy(path, prompt, 8, guess=answer)
    assert cached == [0, 0, 48]
    (kind,) = states_of(session.scheduler.memory)
    assert kind.totals["loaded"] == 1
