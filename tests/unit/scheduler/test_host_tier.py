"""The host tier with an engine whose slots hold hashes: no step reads a page with other tokens.

Copies end late and in random order. All invariants of both places hold after each iteration.
"""

import random
from collections import deque
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import WindowLayers
from minisgl.kvcache import host, snapshots, states
from minisgl.message.messages import AddReq, FlushCache
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.inbox import Messages, WaitS
from minisgl.scheduler.preparation import WAIT_S
from minisgl.scheduler.scheduler import OPENING_WAIT_S
from tests.examples import examples
from tests.unit.scheduler.fake_engine import VOCAB, FakeEngine, expected_output
from tests.unit.scheduler.guarantees import PlanChecks
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_host_slots, check_snapshots

PAGE, MAX_LEN = 2, 48


class HostTierMachine(RuleBasedStateMachine):
    """Drives one scheduler, whose pages and host blocks are few."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            patch.object(host, "_MIN_PIECE", 2),
            patch("minisgl.kvcache.memory.MIN_LOAD_PAGES", 2),
            patch.object(host, "_CLEAN_SHARE", 4),
            patch.object(snapshots, "MAX_GAP", 1),
            patch.object(states, "MIN_NEW_TOKENS", 2),
            patch.object(states, "MIN_BRANCH_TOKENS", 2),
        ]
        for each in self.patches:
            each.start()

    @initialize(
        slack=st.integers(0, 20),
        blocks=st.integers(1, 60),
        rows=st.integers(1, 4),
        budget=st.sampled_from([3, 7, 16, 64]),
        overlap=st.booleans(),
        eager=st.booleans(),
        snapshot_pages=st.sampled_from([0, 2, 3]),
        window_pages=st.none() | st.integers(0, 40),
        num_open=st.sampled_from([0, 60]),
    )
    def start(
        self,
        slack: int,
        blocks: int,
        rows: int,
        budget: int,
        overlap: bool,
        eager: bool,
        snapshot_pages: int,
        window_pages: int | None,
        num_open: int,
    ) -> None:
        """window_pages: those beside one reserve; None: the model has no window layers."""
        num_pages = MAX_LEN // PAGE + slack
        layers = None if window_pages is None else WindowLayers(3, 3 + window_pages)
        self.engine = FakeEngine(
            num_pages,
            PAGE,
            rows,
            MAX_LEN,
            eager,
            window=layers,
            snapshot_pages=snapshot_pages,
            host_blocks=blocks,
        )
        self.engine.copier.num_open = min(num_open, blocks)
        config = SchedulerConfig(prefill_budget_tokens=budget, target_step_ms=None, overlap=overlap)
        self.harness = Harness(self.engine, config, checks=PlanChecks())
        self.prompts: list[list[int]] = []
        self.wanted: dict[int, list[int]] = {}
        self.aborted: set[int] = set()

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "salt"]),
        goes_on=st.booleans(),
    )
    def arrive(
        self, data: st.DataObject, tail: list[int], max_tokens: int, salt: str, goes_on: bool
    ) -> None:
        """A new prompt, or the next turn of an old one."""
        prefix: list[int] = []
        if self.prompts and goes_on:
            base = data.draw(st.sampled_from(self.prompts))
            prefix = base[: data.draw(st.integers(1, len(base)))]
        prompt = (prefix + tail)[: MAX_LEN - max_tokens]
        uid = self.harness.add(prompt, cache_salt=salt, max_tokens=max_tokens)
        self.wanted[uid] = expected_output(prompt, max_tokens, False)
        self.prompts.append(prompt + self.wanted[uid][:-1])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_uids = [uid for uid, answer in self.harness.answers.items() if not answer.finishes]
        if open_uids:
            uid = data.draw(st.sampled_from(open_uids))
            self.harness.abort(uid)
            self.aborted.add(uid)

    @rule()
    def flush(self) -> None:
        self.harness.inbox.messages.append(FlushCache())

    @rule(stores=st.integers(0, 2), loads=st.integers(0, 2), waits=st.integers(0, 3))
    def let_copies_end(self, stores: int, loads: int, waits: int) -> None:
        """Each time, up to 20 blocks more may be used."""
        copier = self.engine.copier
        copier.num_open = min(copier.num_open + 20, copier.num_blocks)
        copier.may_end, copier.waits = [stores, loads], waits

    @rule(count=st.integers(1, 12))
    def iterate(self, count: int) -> None:
        for _ in range(count):
            if self.harness.scheduler.idle and not self.harness.inbox.messages:
                return
            self.harness.step()
            if not self.engine.queue:
                check_host_slots(self.harness.scheduler.memory.tree, self.engine)
                check_snapshots(self.harness.scheduler.memory, self.engine)

    @invariant()
    def outputs_are_those_of_the_plain_computation(self) -> None:
        for uid, wanted in getattr(self, "wanted", {}).items():
            answer = self.harness.answers[uid]
            assert answer.tokens == wanted[: len(answer.tokens)]
            if answer.finishes and uid not in self.aborted:
                assert answer.tokens == wanted

    def teardown(self) -> None:
        try:
            if hasattr(self, "harness"):
                self.harness.run()
                memory = self.harness.scheduler.memory
                memory.flush()
                assert memory.tree.evictable_pages == 0
                assert memory.pool.num_free == memory.pool.size
                assert memory.tier is not None
                assert memory.tier.blocks.num_free == memory.tier.num_open
                assert not memory.tier.jobs
                assert not self.engine.copier.open
                assert not self.harness.scheduler.view.loading
        finally:
            for each in self.patches:
                each.stop()


HostTierMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
TestHostTier = HostTierMachine.TestCase


def test_a_flush_ends_the_loads_that_requests_wait_for() -> None:
    """The copy takes longer than one wait. The request computes its prompt."""
    with patch("minisgl.kvcache.memory.MIN_LOAD_PAGES", 2), patch.object(host, "_CLEAN_SHARE", 1):
        engine = FakeEngine(24, PAGE, 1, MAX_LEN, host_blocks=48)
        harness = Harness(engine, SchedulerConfig(target_step_ms=None))
        prompt = [1] * 40
        for first in (prompt, [2] * 40, [3] * 40):
            harness.add(first, max_tokens=2, ignore_eos=True)
            harness.run()
        uid = harness.add(prompt, max_tokens=2, ignore_eos=True)
        assert engine.copier is not None
        engine.copier.waits = 10
        while not harness.scheduler.view.loading:
            harness.step()
        harness.inbox.messages.append(FlushCache())
        harness.run(50)
    answer = harness.answers[uid]
    assert (answer.tokens, answer.cached_tokens) == (expected_output(prompt, 2, True), 0)


def test_decoding_requests_are_preempted_while_a_copy_of_few_pages_runs() -> None:
    """Its end gives them one page, and two requests or more find none."""
    engine = FakeEngine(25, PAGE, 3, MAX_LEN, host_blocks=48)
    harness = Harness(engine, SchedulerConfig(target_step_ms=None))
    assert engine.copier is not None
    engine.copier.waits = 10**6
    prompts = [2] * 10, [3] * 10, [4] * 10
    with patch.object(host, "_CLEAN_SHARE", 1):
        harness.add([1] * 2, max_tokens=1, ignore_eos=True)
        harness.run(50)
        uids = [harness.add(each, max_tokens=24, ignore_eos=True) for each in prompts]
        harness.run(500)
    assert harness.scheduler.memory.jobs
    for uid, prompt in zip(uids, prompts, strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 24, True)


def test_an_idle_scheduler_sees_the_end_of_its_stores() -> None:
    """Else the next request would find no stored page, and take pages without a copy."""
    with patch("minisgl.kvcache.memory.MIN_LOAD_PAGES", 2), patch.object(host, "_CLEAN_SHARE", 1):
        engine = FakeEngine(24, PAGE, 1, MAX_LEN, host_blocks=48)
        harness = Harness(engine, SchedulerConfig(target_step_ms=None))
        scheduler, copier = harness.scheduler, engine.copier
        assert copier is not None
        harness.add([1] * 40, max_tokens=2, ignore_eos=True)
        harness.run()
        assert scheduler.idle
        assert scheduler.memory.jobs
        assert not scheduler.waits_for_message
        assert scheduler.message_wait_s() == WAIT_S
        copier.may_end = [99, 0]
        for _ in range(20):
            harness.step()
        assert scheduler.waits_for_message
        assert scheduler.message_wait_s() is None
        assert scheduler.memory.tier is not None
        assert scheduler.memory.tier.usage()["copied"] == 20  # all pages of the request
        harness.add([2] * 40, max_tokens=2, ignore_eos=True)
        harness.run()
        copier.may_end = [99, 99]
        uid = harness.add([1] * 40, max_tokens=2, ignore_eos=True)
        harness.run()
    assert harness.answers[uid].cached_tokens == 38


def test_an_idle_scheduler_stores_pages_into_blocks_that_become_usable() -> None:
    """The driver locks the host memory for seconds, while the first requests run and end."""
    with patch.object(host, "_CLEAN_SHARE", 1):
        engine = FakeEngine(24, PAGE, 1, MAX_LEN, host_blocks=48)
        copier = engine.copier
        assert copier is not None
        copier.num_open, copier.is_opening = 0, True
        harness = Harness(engine, SchedulerConfig(target_step_ms=None))
        scheduler, tier = harness.scheduler, harness.scheduler.memory.tier
        assert tier is not None
        harness.add([1] * 40, max_tokens=2, ignore_eos=True)
        harness.run()
        assert (scheduler.idle, tier.jobs) == (True, {})
        assert scheduler.message_wait_s() == OPENING_WAIT_S
        copier.num_open, copier.is_opening = 48, False
        assert not scheduler.waits_for_message  # the number of blocks has not arrived yet
        copier.may_end = [99, 0]
        while not scheduler.waits_for_message:
            harness.step()
    assert tier.usage() == {"copied": 20, "host": 0, "moving": 0, "free": 28}


class Leader(LocalInbox):
    """Keeps the messages of each iteration for another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: deque[Messages] = deque()

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        self.sent.append(super().receive(wait_s, plan_hash, own))
        return self.sent[-1]


class Follower(LocalInbox):
    """Drops the messages of its rank, and reads those of the leader."""

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self.leader = leader

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        return self.leader.sent.popleft()


@pytest.mark.parametrize("seed", range(3))
def test_ranks_whose_copies_end_at_different_times_plan_the_same_steps(seed: int) -> None:
    source = random.Random(seed)
    leader = Leader()
    config = SchedulerConfig(prefill_budget_tokens=16, target_step_ms=None)
    with patch("minisgl.kvcache.memory.MIN_LOAD_PAGES", 2), patch.object(host, "_CLEAN_SHARE", 4):
        ranks = []
        for inbox in (leader, Follower(leader)):
            engine = FakeEngine(40, PAGE, 3, MAX_LEN, host_blocks=60)
            scheduler = Scheduler(
                engine,
                config,
                vocab_size=VOCAB,
                eos_token_ids=(),
                inbox=inbox,
                send=lambda output: None,
            )
            assert engine.copier is not None
            engine.copier.num_open = 20
            ranks.append((scheduler, engine))
        texts = [[source.randrange(VOCAB) for _ in range(30)] for _ in range(5)]
        for uid in range(40):
            text = np.array(source.choice(texts)[: source.randint(10, 30)], dtype="<i4")
            sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=0)
            leader.messages.append(AddReq(uid=uid, token_ids=text.tobytes(), sampling=sampling))
            for _ in range(source.randint(1, 12)):
                if ranks[0][0].idle and not leader.messages:
                    break
                for scheduler, engine in ranks:
                    assert engine.copier is not None
                    engine.copier.may_end = [source.randint(0, 1), source.randint(0, 1)]
                    engine.copier.num_open = min(engine.copier.num_open + source.randint(0, 9), 60)
                    scheduler.iterate()
    hashes = [[batch.plan_hash() for batch in engine.batches] for _, engine in ranks]
    assert hashes[0] == hashes[1]
    assert ranks[0][1].copier is not None
    assert ranks[0][1].copier.loads
