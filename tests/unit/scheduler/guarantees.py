"""The guarantees of every plan, checked around each call of `plan`.

The names F1 to F15 are those of docs/decisions/28-plan-and-apply.md. test_fairness.py has F8,
and F1 with its real limit.
"""

from collections import Counter
from unittest.mock import patch

import numpy as np

from minisgl.core.config import MIN_CHUNK_TOKENS, smallest_chunk
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.memory import Memory
from minisgl.kvcache.snapshots import Snapshot
from minisgl.kvcache.states import Saving
from minisgl.scheduler import budget, filling, scheduler
from minisgl.scheduler import plan as planning
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import StepPlan, View
from tests.unit.scheduler.integrity import nodes_of, states_of, windows_of


class PlanChecks:
    """Replaces `plan` in a scheduler of one engine, and checks each plan that it makes."""

    def __init__(self) -> None:
        self.left_out: Counter[int] = Counter()  # by uid: steps in a row without the row

    def __call__(self, view: View) -> StepPlan:
        before, hits = state_of(view), Counter[str]()
        find = Memory.hit

        def counting(memory: Memory, req: Req) -> object:
            hits[req.client] += 1
            return find(memory, req)

        with patch.object(Memory, "hit", counting):
            plan = planning.plan(view)
        assert state_of(view) == before, "a plan changed the state"
        self.f1_one_plan_skips_few_requests_of_a_client(view, plan, hits)
        self.f2_overtakes_are_bounded(view, plan)
        self.f3_rows_pause_few_steps_in_a_row(view, plan)
        self.f4_a_row_stays_free_for_the_first_priority(view, plan)
        self.f5_the_last_request_of_a_client_is_not_preempted_for_another_client(view, plan)
        self.f6_each_client_gets_an_equal_part_first(view, plan)
        self.f7_the_first_request_of_a_client_is_looked_up_first(view, plan)
        self.f9_something_runs_while_requests_wait(view, plan)
        self.f10_prompts_go_on_in_every_step(view, plan)
        self.f11_a_step_ends_the_first_prompts_of_its_own_clients(view, plan)
        self.f12_no_chunk_ends_within_an_image_that_lies_in_one_chunk(view, plan)
        self.f13_no_step_has_more_prompt_tokens_than_the_warm_up(view, plan)
        self.f14_an_image_is_passed_over_few_steps_in_a_row(view, plan)
        self.f15_prompt_tokens_are_within_the_budget_beside_the_rows_of_the_step(view, plan)
        return plan

    def f1_one_plan_skips_few_requests_of_a_client(
        self, view: View, plan: StepPlan, hits: Counter[str]
    ) -> None:
        """Each round skips MAX_DEFERRED at most; at the end of a round, one finds no pages.

        One round more takes the first prompts of clients that receive no tokens.
        """
        rounds = 2 * len({level for level, _ in view.waiting.uncached_tokens}) + 1
        admitted = Counter(req.client for req in plan.admit)
        for client, count in hits.items():
            assert count - admitted[client] <= rounds * (filling.MAX_DEFERRED + 1)

    def f2_overtakes_are_bounded(self, view: View, plan: StepPlan) -> None:
        """The step before a plan raises a request that was overtaken too often."""
        if view.waiting.longest_delayed(view.prefilling) is not None:
            assert view.carry.overtakes < scheduler.MAX_OVERTAKES
        assert plan.carry.overtakes <= view.carry.overtakes + len(plan.admit)

    def f3_rows_pause_few_steps_in_a_row(self, view: View, plan: StepPlan) -> None:
        """A row that has room is left out in MAX_PAUSES steps in a row at most."""
        if not (len(plan.decode.rows) or plan.chunks):
            return
        ends = -(-(view.table.computed[view.decode_rows] + 1) // view.memory.page_size)
        has_room = ends <= view.memory.table.counts[view.decode_rows]
        has_room |= np.isin(view.decode_rows, plan.grow)
        fitting = view.decode_rows
        for kind in [each.room() for each in view.memory.kinds]:
            fitting = fitting[kind.grow(fitting, np.ones(len(fitting), np.int32)) > 0]
        has_room &= np.isin(view.decode_rows, fitting)
        runs = np.isin(view.decode_rows, plan.decode.rows)
        left_out = view.decode_rows[has_room & ~runs].tolist()
        reqs = [view.table.req_at(row) for row in left_out]
        uids = [req.uid for req in reqs if req is not plan.preempt]
        self.left_out = Counter({uid: self.left_out[uid] + 1 for uid in uids})
        assert max(self.left_out.values(), default=0) <= planning.MAX_PAUSES

    def f4_a_row_stays_free_for_the_first_priority(self, view: View, plan: StepPlan) -> None:
        rows = view.table.rows
        later = [i for i, req in enumerate(plan.admit) if not view.waiting.is_first(req)]
        if later:
            assert rows.num_free - later[-1] > rows.size // filling.RESERVED_ROWS

    def f5_the_last_request_of_a_client_is_not_preempted_for_another_client(
        self, view: View, plan: StepPlan
    ) -> None:
        victim = plan.preempt
        ends = -(-(view.table.computed[view.decode_rows] + 1) // view.memory.page_size)
        lacks = view.decode_rows[ends > view.memory.table.counts[view.decode_rows]]
        if victim is None or not np.isin(lacks, plan.grow).all():
            return  # requests that decode are short of pages: F9
        running = [
            req for req in view.table.reqs if req is not None and view.table.running[req.row]
        ]
        running += plan.admit
        of_client = sum(req.client == victim.client for req in running)
        waits_earlier = any(req.priority < victim.priority for req in view.waiting)
        assert of_client > 1 or waits_earlier or view.memory.kinds

    def f6_each_client_gets_an_equal_part_first(self, view: View, plan: StepPlan) -> None:
        keys = {
            *view.waiting.uncached_tokens,
            *((req.priority, req.client) for req in view.prefilling),
        }
        if view.memory.kinds or view.images.limits.rows or not keys or own_clients(view, plan):
            return
        first = min(level for level, _ in keys)
        clients = [client for level, client in keys if level == first]
        chunks = {req: tokens for req, tokens in plan.chunks.items() if req.priority == first}
        part = sum(chunks.values()) // len(clients)
        for client in clients:
            mine = [
                req
                for req in view.prefilling
                if (req.priority, req.client) == (first, client) and req is not plan.preempt
            ]
            rest = sum(
                int(view.table.prefill_end[r.row] - view.table.computed[r.row]) for r in mine
            )
            got = sum(tokens for req, tokens in chunks.items() if req.client == client)
            assert got >= min(part, rest), "a client got less than its part"

    def f7_the_first_request_of_a_client_is_looked_up_first(
        self, view: View, plan: StepPlan
    ) -> None:
        """A preempted request is the first one of its client, and of no other client."""
        for level, client in view.waiting.uncached_tokens:
            queue = [*view.waiting.of(client, level)]
            seen = [r for r in plan.seen if (r.priority, r.client) == (level, client)]
            assert not seen or seen[0] is queue[0]
            oldest = [req.admitted or req.loaded for req in queue if req.call == queue[0].call]
            raised = sum(not admitted for admitted in oldest[: sum(oldest)])
            assert raised <= 1, "a new request is before a preempted one"

    def f9_something_runs_while_requests_wait(self, view: View, plan: StepPlan) -> None:
        if (
            view.in_flight
            or view.paused
            or view.memory.jobs
            or plan.load
            or not (view.has_prompts or len(view.decode_rows))
        ):
            return
        assert len(plan.decode.rows) or plan.chunks or plan.preempt is not None

    def f10_prompts_go_on_in_every_step(self, view: View, plan: StepPlan) -> None:
        if view.memory.kinds or plan.preempt is not None or own_clients(view, plan):
            return
        if any(not part.first for part in plan.encode):  # a step that begins an image
            return
        config = view.config
        rest = sum(tokens_before_images(view, req) for req in view.prefilling)
        least = MIN_CHUNK_TOKENS if config.target_step_ms is not None else 1
        got = sum(plan.chunks.values())
        assert got >= min(least, rest, config.prefill_budget_tokens)

    def f11_a_step_ends_the_first_prompts_of_its_own_clients(
        self, view: View, plan: StepPlan
    ) -> None:
        """The step before had prompts of all clients."""
        clients, chunks = own_clients(view, plan), plan.chunks
        if not clients:
            return
        assert not view.carry.paused_steps
        assert chunks
        assert {req.client for req in chunks} <= clients
        for client in clients:
            mine = [req for req in view.prefilling if req.client == client]
            limited = bool(view.memory.kinds or view.images.limits.rows)
            if mine and mine[0] is not plan.preempt and not limited:
                rest = view.table.prefill_end[mine[0].row] - view.table.computed[mine[0].row]
                assert chunks[mine[0]] == rest

    def f12_no_chunk_ends_within_an_image_that_lies_in_one_chunk(
        self, view: View, plan: StepPlan
    ) -> None:
        limits = view.images.limits
        for req, tokens in plan.chunks.items():
            hit = plan.admit.get(req)
            start = int(view.table.computed[req.row]) if hit is None else hit.tokens
            for image in req.images if limits.mutual else ():
                end = image.start + limits.tokens(image.grid)
                assert not image.start < start + tokens < end

    def f13_no_step_has_more_prompt_tokens_than_the_warm_up(
        self, view: View, plan: StepPlan
    ) -> None:
        """An image may exceed the budget, with the tokens of the smallest chunk before it."""
        most, limits = view.config.prefill_budget_tokens, view.images.limits
        least = smallest_chunk(view.memory.page_size)
        images = [image for req in plan.chunks if limits.mutual for image in req.images]
        spans = [limits.tokens(image.grid) + least for image in images]
        assert sum(plan.chunks.values()) <= max([most, least, *spans])

    def f14_an_image_is_passed_over_few_steps_in_a_row(self, view: View, plan: StepPlan) -> None:
        req, steps = view.carry.passed
        if req is None or steps < filling.MAX_PASSED or view.memory.kinds:
            return
        if req in view.prefilling and plan.preempt is not req:
            assert req in plan.chunks or plan.encode

    def f15_prompt_tokens_are_within_the_budget_beside_the_rows_of_the_step(
        self, view: View, plan: StepPlan
    ) -> None:
        """A preempted request counted in the budget."""
        if view.images.limits.rows or plan.preempt is not None or own_clients(view, plan):
            return
        if not plan.chunks:  # perhaps no prompt waits, and the budget is of none
            return
        urgent = view.has_urgent(view.prefilling)
        most = budget.step_budget(view, view.prefilling, plan.decode, urgent).budget
        assert sum(plan.chunks.values()) <= most


def tokens_before_images(view: View, req: Req) -> int:
    """The tokens of an admitted prompt up to the next image."""
    start, end = int(view.table.computed[req.row]), int(view.table.prefill_end[req.row])
    for image in req.images:
        if image.start + view.images.limits.tokens(image.grid) > start:
            return min(end, max(image.start, start)) - start
    return end - start


def own_clients(view: View, plan: StepPlan) -> set[str]:
    """The clients that receive no tokens, if the step has prompts of these clients only."""
    if not plan.carry.paused_steps or view.waiting.several_priorities:
        return set()
    served = {view.table.req_at(row).client for row in view.decode_rows.tolist()}
    served |= {req.client for req in view.paused}
    waiting = {client for _, client in view.waiting.uncached_tokens}
    return waiting.union(req.client for req in view.prefilling) - served


def state_of(view: View) -> list[object]:
    """Return copies of the columns, the tree, the pools and the queue, for a comparison."""
    memory, table, pages = view.memory, view.table, view.memory.table
    found: list[object] = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    found += [pages.entries, pages.counts, pages.sent, memory.shared, view.decode_rows, view.carry]
    found += [pool_state(memory.pool), pool_state(table.rows)]
    for node in nodes_of(memory.tree):
        found += [node, node.tokens, node.pages, node.parts, node.last_use, node.lock_count]
        found += [node.fence, node.entry, node.kept_as, node.session, node.key, node.place]
        found += [node.blocks]
    found += [memory.tree.evictable_pages, memory.tree.fenced_pages, memory.tree.clock]
    if memory.tier is not None:
        found += [memory.tier.blocks.num_free, memory.tier.clean_pages, [*memory.tier.jobs]]
    for reqs in (view.waiting, view.loading, view.prefilling, view.unpublished, view.paused):
        found.append([(req.uid, req.priority, req.state, req.row, req.admitted) for req in reqs])
    found += [view.images.opened, [*view.images._rows]]
    found += [view.waiting.first_priority, view.waiting.uncached_tokens, [*view.waiting._queues]]
    for states in states_of(memory):
        found += [vars(states)[name] for name in ("_savings", "_due", "_saves", "_loads")]
        found += [states.snapshots.own, states.snapshots._lru, states.snapshots.fenced]
    for windows in windows_of(memory):
        found += [pool_state(windows.pages.pool), windows.pages.users, windows.pages.cached]
        found += [windows.pages._last_step, windows.pages._lru, windows.first, windows._reserve]
        found += [windows._kept_first, windows._kept_end, windows.table.entries]
        found += [windows.table.counts, windows.table.sent]
    return [copied(value) for value in found]


def pool_state(pool: FencedPool) -> list[object]:
    return [pool._stack, pool.num_free, pool.allocated, pool._quarantine, pool.steps.resolved]


def copied(value: object) -> object:
    """Return a value that later changes of `value` do not reach. Nodes and requests stay.

    repr would take as long as all other parts of the tests that compare states.
    """
    match value:
        case np.ndarray():
            return value.tobytes()
        case dict():
            return [(copied(key), copied(of_key)) for key, of_key in value.items()]
        case list() | tuple():
            return [copied(each) for each in value]
        case Snapshot() | Saving():
            return [copied(getattr(value, name)) for name in value.__slots__]
    return value
