"""Random arrivals, shared prefixes, forced tokens, drafts, aborts and tiny pools.

All invariants hold after each step, each plan keeps its guarantees, and every request gets the
tokens of the plain computation.
"""

from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core import FinishReason, SchedulerConfig, StepCost
from minisgl.core.batch import WindowLayers
from minisgl.kvcache import snapshots, states
from minisgl.message.messages import EndSession, FlushCache
from minisgl.scheduler import budget, filling, plan, scheduler, view
from tests.examples import examples
from tests.unit.scheduler.drafts import DRAFTERS, PREDICTIONS, ChangingDrafts
from tests.unit.scheduler.fake_engine import VOCAB, FakeEngine, expected_output
from tests.unit.scheduler.fake_images import image_limits, prompt_with
from tests.unit.scheduler.guarantees import PlanChecks
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_cached_slots, check_snapshots

MAX_LEN = 48
# Prompts of at most 32 tokens with images of 1 to 4 tokens, three of which fit into every buffer.
IMAGE = st.tuples(st.integers(0, 2), st.tuples(st.integers(1, 2), st.integers(1, 2)))
PARTS = st.lists(st.integers(1, VOCAB - 1) | IMAGE, min_size=1, max_size=8)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives one scheduler. The fake engine detects every wrong KV slot."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        slack=st.integers(0, 12),
        rows=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 7, 16, 64]),
        overlap=st.booleans(),
        eager=st.booleans(),
        cache_type=st.sampled_from(["radix", "radix", "naive"]),
        seconds=st.none()
        | st.lists(st.floats(0, 0.03), min_size=3, max_size=3)
        | st.just([0.004, 0.004, 0.03]),  # a mixed step costs little more, as on a GPU
        target_step_ms=st.sampled_from([None, 15.0]),
        clients=st.sampled_from([[""], ["a", "b"], ["a", "b", "c"]]),
        most_drafts=st.none() | st.integers(0, 7),
        drafter=st.sampled_from(sorted(DRAFTERS)),
        window=st.none() | st.integers(1, 20),
        window_slack=st.integers(0, 12),
        snapshot_pages=st.sampled_from([0, 2, 3]),
        image_rows=st.sampled_from([0, 0, 16, 30]),
        price=st.sampled_from([0.1, 1.0, 4.0]),
        mutual=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        slack: int,
        rows: int,
        budget: int,
        overlap: bool,
        eager: bool,
        cache_type: str,
        seconds: list[float] | None,
        target_step_ms: float | None,
        clients: list[str],
        most_drafts: int | None,
        drafter: str,
        window: int | None,
        window_slack: int,
        snapshot_pages: int,
        image_rows: int,
        price: float,
        mutual: bool,
    ) -> None:
        """seconds: step costs that the scheduler knows; None: it knows none.

        most_drafts: steps have up to this many drafts; None: the scheduler makes none.
        window: tokens of a window; None: the model has no window layers.
        snapshot_pages: of a model with recurrent states. A draft then stays within two pages, and a
        chunk has at least a page.
        image_rows: of the image buffer; 0: the model takes no images. price, mutual: as for
        image_limits. No model with recurrent states has images that attend to each other.
        """
        mutual = mutual and bool(image_rows) and not snapshot_pages
        if snapshot_pages:
            page_size = page_size if most_drafts is None else 8
            budget = max(budget, page_size)
        num_pages = -(-MAX_LEN // page_size) + slack
        layers = None
        if window is not None:
            least = WindowLayers(window, 0).reserve(page_size, 4 if mutual else 1)
            layers = WindowLayers(window, least + window_slack)
        engine = FakeEngine(
            num_pages,
            page_size,
            rows,
            MAX_LEN,
            eager,
            DRAFTERS[drafter],
            layers,
            snapshot_pages,
            images=image_limits(image_rows, price=price, mutual=mutual) if image_rows else None,
        )
        config = SchedulerConfig(
            prefill_budget_tokens=budget,
            target_step_ms=target_step_ms,
            cache_type=cache_type,
            overlap=overlap,
        )
        drafts = None if most_drafts is None else ChangingDrafts(most_drafts)
        self.harness = Harness(engine, config, drafts=drafts, checks=PlanChecks())
        if seconds is not None:
            attention_s = seconds[0] / 10
            cost = StepCost(
                tokens=(1, 32, 96),
                seconds=tuple(sorted(seconds)),
                per_decode_key_s=attention_s,
                per_prefill_pair_s=attention_s,
            )
            self.harness.scheduler.view.cost = cost
        self.clients = clients
        self.wanted: dict[int, list[int]] = {}
        self.prompts: list[list[int]] = []
        self.sequences: dict[int, tuple[str, list[int]]] = {}
        self.aborted: set[int] = set()
        self.predicting: set[int] = set()

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 16),
        ignore_eos=st.booleans(),
        salt=st.sampled_from(["", "", "salt"]),
        session=st.sampled_from(["", "a", "b"]),
        stretch=st.none() | st.integers(0, 6),
        polls=st.integers(0, 4),
        slow=st.booleans(),
        at_once=st.booleans(),
        call=st.integers(0, 2),
        count=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([0, 0, -1, 2]),
        predicts=st.sampled_from(sorted(PREDICTIONS)),
    )
    def arrive(
        self,
        data: st.DataObject,
        max_tokens: int,
        ignore_eos: bool,
        salt: str,
        session: str,
        stretch: int | None,
        polls: int,
        slow: bool,
        at_once: bool,
        call: int,
        count: int,
        priority: int,
        predicts: str,
    ) -> None:
        """stretch, polls, slow: as in ScriptedParams; None: the request has no constraint."""
        prefix: list[int] = []
        takes_images = self.harness.engine.images is not None
        if takes_images and data.draw(st.booleans(), label="has images"):
            prefix, images = prompt_with(data.draw(PARTS, label="parts"))
        else:
            images = ()
        if not images and self.prompts and data.draw(st.booleans(), label="shares a prefix"):
            base = data.draw(st.sampled_from(self.prompts), label="base")
            prefix = base[: data.draw(st.integers(1, len(base)), label="shared tokens")]
        tail = data.draw(
            st.lists(st.integers(0, VOCAB - 1), min_size=0 if prefix else 1, max_size=20)
        )
        prompt = [*prefix, *tail][: MAX_LEN - max_tokens]
        sampling: dict[str, object] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
        output = expected_output(prompt, max_tokens, ignore_eos)
        if stretch is not None:
            sampling |= {"prompt_len": len(prompt), "script": tuple(output)}
            sampling |= {"stretch": stretch, "polls": polls, "slow": slow}
            sampling |= {"start_s": 0.0} if at_once else {}
        client = data.draw(st.sampled_from(self.clients), label="client")
        prediction = PREDICTIONS[predicts](output)
        queue = client, call, count, priority
        ends = data.draw(st.tuples(*[st.integers(0, len(prompt))] * 2), label="stable, first")
        given = *queue, prediction, *ends, session, images
        first = self.harness.add(prompt, salt, *given, **sampling)
        for uid in range(first, first + count):
            self.wanted[uid] = output
            if prediction:
                self.predicting.add(uid)
            if not images:
                self.prompts.append(prompt + output)
            self.sequences[uid] = salt, prompt + output

    @rule(session=st.sampled_from(["a", "b"]))
    def end_session(self, session: str) -> None:
        self.harness.inbox.messages.append(EndSession(session=session))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), stop=st.booleans())
    def abort(self, data: st.DataObject, stop: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.wanted)))
        self.aborted.add(uid)
        self.harness.abort(uid, FinishReason.STOP if stop else FinishReason.ABORT)

    @rule()
    def flush(self) -> None:
        self.harness.inbox.messages.append(FlushCache())

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.harness.scheduler.idle or self.harness.inbox.messages:
                self.harness.step()

    @invariant()
    def outputs_are_prefixes_of_the_plain_computation(self) -> None:
        if not hasattr(self, "harness"):
            return
        for uid, answer in self.harness.answers.items():
            assert answer.tokens == self.wanted[uid][: len(answer.tokens)]
            assert len(answer.finishes) <= 1

    @invariant()
    def cached_tokens_come_from_requests_with_the_same_salt(self) -> None:
        if not hasattr(self, "harness"):
            return
        for uid, answer in self.harness.answers.items():
            salt, tokens = self.sequences[uid]
            hit = tokens[: answer.cached_tokens]
            others = [t for other, (s, t) in self.sequences.items() if other != uid and s == salt]
            assert not hit or any(t[: len(hit)] == hit for t in others)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        scheduler = self.harness.scheduler
        pool, cache = scheduler.memory.pool, scheduler.memory.tree
        snapshots = sum(sum(kind.evictable()) for kind in scheduler.memory.kinds)
        assert pool.num_free + cache.evictable_pages + snapshots == pool.size
        check_cached_slots(cache, self.harness.engine)
        check_snapshots(scheduler.memory, self.harness.engine)
        for uid, answer in self.harness.answers.items():
            assert len(answer.finishes) == 1, "exactly one Finished message"
            if uid not in self.predicting:
                assert answer.predicted == answer.accepted == 0
            if uid not in self.aborted:
                assert answer.tokens == self.wanted[uid]
                assert answer.finishes[0] in (FinishReason.STOP, FinishReason.LENGTH)


class TestSchedulerMachine(SchedulerMachine.TestCase):
    """Allows steps of any size and short shared prefixes.

    Otherwise the machine's short prompts would never be split into even steps, nor wait for each
    other. The limits of a plan are small, so that the machine reaches them.
    """

    settings = settings(max_examples=examples(150), stateful_step_count=40)

    def setUp(self) -> None:
        self.enterContext(patch.object(budget, "EVEN_STEP_TOKENS", 1))
        self.enterContext(patch.object(view, "step_sizes", lambda most: [*range(1, most + 1)]))
        self.enterContext(patch.object(view, "MIN_SHARED_TOKENS", 4))
        self.enterContext(patch.object(scheduler, "MAX_OVERTAKES", 3))
        self.enterContext(patch.multiple(states, MIN_NEW_TOKENS=4, MIN_BRANCH_TOKENS=1))
        self.enterContext(patch.object(snapshots, "MAX_GAP", 1))
        self.enterContext(patch.object(plan, "MAX_PAUSES", 3))
        self.enterContext(patch.multiple(filling, RESERVED_ROWS=3, MAX_DEFERRED=2, MAX_PASSED=2))
