"""`Filling`: adds prompts to the step that a plan makes."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from minisgl.core.config import smallest_chunk
from minisgl.kvcache.memory import Room
from minisgl.kvcache.node import Hit
from minisgl.scheduler.budget import further_tokens, step_budget
from minisgl.scheduler.image_room import ImageRoom
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_DEFERRED = 64  # requests of a client that one round of a plan skips at most, to limit its time
FURTHER_SHARE = 1.1  # a step with further choices takes this many times the step without, or more
MAX_LOADING = 4  # requests whose prefixes are loaded from host memory at a time
MAX_PASSED = 8  # steps in a row that pass a request over, because its image exceeds their budget
RESERVED_ROWS = 16  # one of this many rows stays free for the first priority in use


class Decoding(NamedTuple):
    """The decoding rows of a step.

    decode  those with pages for their next tokens.
    victim  the request to preempt for their pages, if there is one.
    admit   requests may be admitted: all rows have memory. If it is False and `victim` is None, the
            step in flight frees the missing pages.
    """

    decode: Decode
    victim: Req | None
    admit: bool


class Filling:
    """Fills one step with prompts. All counters are local to a plan.

    left    the prompt tokens that the step may still get.
    admits  requests may be admitted.
    beside  the decoding rows that run beside the prompts. Rows of later priorities pause while the
            first priority in use has prompts.
    chunks  as in StepPlan.
    images  the images of the step.
    """

    def __init__(self, view: View, room: Room, decoding: Decoding, may_pause: bool) -> None:
        """may_pause: as in `plan`."""
        self._view, self._room = view, room
        decode, victim, self.admits = decoding
        self._victim = victim
        self._prefilling = [req for req in view.prefilling if req is not victim]
        # _prefilling by priority and client.
        self._prompts: dict[tuple[int, str], list[Req]] = {}
        for req in self._prefilling:
            self._prompts.setdefault((req.priority, req.client), []).append(req)
        self._shares = view.shares()
        rows, priority = view.table.rows, view.table.priority
        self._last_priority = priority.max(where=rows.allocated, initial=-(2**31))
        self.chunks: dict[Req, int] = {}
        least = smallest_chunk(view.memory.page_size)
        self.images = ImageRoom(view.images, self.chunks, least, divides=len(decode.rows) > 0)
        self._admit: dict[Req, Hit] = {}
        self._load: list[Req] = []
        self._seen: list[Req] = []
        # The first request that found no room, although its client is within its share or a
        # request of a later priority runs.
        self._blocked: Req | None = None
        urgent = view.has_urgent(self._prefilling)
        self.beside = decode
        if may_pause and urgent and view.waiting.several_priorities:
            self.beside = decode.only(priority[decode.rows] <= view.waiting.first_priority)
        self._decoding_calls: set[int] = set()  # those whose further choices get fewer tokens
        self.left = self._open_step(urgent)

    def _open_step(self, urgent: bool) -> int:
        """Return the prompt tokens of the step. urgent: as for step_budget.

        The decoding rows set the prices of images. The image that the newest step left takes its
        part first. If other clients may wait for the end of the step, further choices of calls that
        decode get fewer tokens.

        Without an admitted prompt, or a waiting one and a free row, no request can use prompt
        tokens, and their number is not computed. The result is then 1: a waiting request needs one
        token to ask for the row of a running request.
        """
        view, prefilling = self._view, self._prefilling
        if not (prefilling or (view.waiting and self._rows_left)):
            return 1
        if len(view.waiting.clients) > 1:
            calls = view.table.call[view.with_paused(self.beside.rows)]
            self._decoding_calls = {*calls.tolist()}
        starts = ((req, view.rest(req)[0]) for req in prefilling)
        prices = step_budget(view, prefilling, self.beside, urgent)
        return self.images.resume(starts, prices, len(prefilling) + len(view.waiting) > 1)

    def take_passed(self) -> bool:
        """Add the first chunk of the step for a request that MAX_PASSED steps passed over."""
        req, steps = self._view.carry.passed
        if req is None or steps < MAX_PASSED:
            return False
        if req in self._prefilling:
            self._add_chunk(req, self.left)
        elif self.admits:
            self._admit_from(req.priority, req.client, 0)
        return True

    def has_urgent_work(self) -> bool:
        """The step has a chunk, or layers of an image, of the first priority in use."""
        first = filter(self._view.waiting.is_first, self._prefilling)
        return any(req in self.chunks or self.images.encodes(req) for req in first)

    def of_new_clients(self) -> tuple[Decode, dict[tuple[int, str], int]]:
        """Return a step that ends the first prompts of clients that receive no tokens.

        Returns its decoding rows, and the prompt tokens of each priority and client in their order.
        There are none if the step would leave nothing out, if the budget does not suffice, or if
        the step before was such a step.
        """
        view, table, decode = self._view, self._view.table, self.beside
        number, several_priorities = view.waiting.clients, view.waiting.several_priorities
        if len(number) < 2 or several_priorities or view.carry.paused_steps:
            return decode, {}
        rows = view.with_paused(view.decode_rows)
        served = np.bincount(table.client[rows], minlength=len(number)).tolist()
        prompts = chain(view.waiting.uncached_tokens, self._prompts)
        if all(served[number[client]] for _, client in prompts):
            return decode, {}
        keys = [(level, client) for level, clients in self.levels() for client in clients]
        first = {key: self._first_tokens(*key) for key in keys if not served[number[key[1]]]}
        needed = sum(first.values())
        if needed > self.left:
            return decode, {}
        _, first_rows = np.unique(table.call[decode.rows], return_index=True)
        fewer = decode.only(np.isin(np.arange(len(decode.rows)), first_rows))
        works = view.work(decode), view.work(fewer)
        whole_s, fewer_s = (
            view.cost.predict_s(work._replace(tokens=needed + work.tokens)) for work in works
        )
        if whole_s > FURTHER_SHARE * fewer_s:
            return fewer, first
        return decode, {} if len(first) == len(keys) else first

    def _first_tokens(self, level: int, client: str) -> int:
        """The prompt tokens that the first prompt of this client and priority has left.

        Those that its images take are added.
        """
        admitted = self._prompts.get((level, client), ())
        req = next(chain(admitted, self._view.waiting.of(client, level)))
        start, end = self._view.rest(req)
        return end - start + self.images.tokens(req, start)

    def levels(self) -> Iterator[tuple[int, list[str]]]:
        """The priorities with prompts in their order, each with its clients in their order."""
        keys = {*self._view.waiting.uncached_tokens, *self._prompts}
        for level in sorted({level for level, _ in keys}):
            yield level, self._shares.in_order(client for of, client in keys if of == level)

    def waits(self, level: int) -> bool:
        """A request of this priority, or of one before it, stays in the queue."""
        left = (req for req in self._view.waiting if req not in self._admit)
        return next((req.priority <= level for req in left), False)

    def take(self, level: int, client: str, most: int) -> None:
        """Give prompts of one client and priority up to `most` of the tokens that are left."""
        kept = max(self.left - most, 0)
        if self.left <= kept:
            return
        for req in self._prompts.get((level, client), ()):
            self._add_chunk(req, self._most(req, self.left - kept))
        if self.admits:
            self._admit_from(level, client, kept)

    def _admit_from(self, level: int, client: str, kept: int) -> None:
        """Admit requests of one client and priority, while more than `kept` tokens are left.

        While a request of another client is blocked, only requests within their client's share are
        admitted. Later priorities leave some rows to the first one. A request waits too if images
        leave it less than the smallest chunk: it would hold a row and pages.
        """
        view, deferred, reserved = self._view, 0, 0
        if level > view.waiting.first_priority:
            reserved = view.table.rows.size // RESERVED_ROWS
        for req in view.waiting.of(client, level, [*self._admit]):
            left = self.left - kept
            if self._most(req, left) <= 0:
                break
            pages = view.memory.pages_for(len(req.tokens))
            within = self._shares.is_within(req, pages)
            if self._rows_left <= reserved or not (within or self._blocked is None):
                self._block(req, within)
                break
            hit = view.memory.hit(req)
            self._seen.append(req)
            loads = not req.loaded and view.memory.loads(hit)
            if self._waits_for_others(req, hit, loads):
                deferred += 1
                if deferred == MAX_DEFERRED:
                    break
                continue
            busy = bool(self.chunks or self.images.parts)
            if busy and not loads and self.images.wait(req, hit.tokens, left):
                break
            if not self._room.open(row_of(req), req, hit, loads):
                self._block(req, within)
                break
            if loads:
                self._load.append(req)
                continue
            self._shares.record_admitted(req, pages)
            self._last_priority = max(self._last_priority, level)
            self._admit[req] = hit
            self._prefilling.append(req)
            self._prompts.setdefault((level, client), []).append(req)
            self._add_chunk(req, self._most(req, left))

    @property
    def _rows_left(self) -> int:
        return self._view.table.rows.num_free - len(self._admit)

    def _waits_for_others(self, req: Req, hit: Hit, loads: bool) -> bool:
        """An older request computes a prefix of `req`, or the host tier loads enough others."""
        view = self._view
        others = (r for r in chain(view.unpublished, self._admit) if r is not self._victim)
        shared, _ = view.shared_with_older(req, hit.tokens, others)
        return shared > 0 or (loads and len(view.loading) + len(self._load) == MAX_LOADING)

    def _most(self, req: Req, left: int) -> int:
        """Return the most tokens of `left` that the request may use.

        Further choices may use as many as the other prompts, so that these do not stop them.
        """
        if not self._is_further(req):
            return left
        used = sum(tokens for other, tokens in self.chunks.items() if self._is_further(other))
        first = sum(self.chunks.values()) - used
        return min(left, max(self._further_tokens - first, first) - used)

    @cached_property
    def _further_tokens(self) -> int:
        """The prompt tokens of a step with further choices of calls that decode."""
        prefilling = [req for req in self._prefilling if req not in self._admit]
        return further_tokens(self._view, prefilling, self.beside)

    def _is_further(self, req: Req) -> bool:
        """The request has prompt tokens of a call that decodes.

        Forced tokens are none. A preempted request computes a part of its tokens again.
        """
        again = req.row < 0 or req in self._view.unpublished
        return req.call in self._decoding_calls and (again or not req.prefill_done)

    def plan(self, decode: Decode, paused_steps: int = 0) -> StepPlan:
        """Return the step. paused_steps: as in Carry."""
        victim = self._victim
        if victim is None and self._blocked is not None:
            victim = self._make_room(self._blocked)
        if victim is not None:
            decode = decode.only(decode.rows != victim.row)
            self.chunks.pop(victim, None)
        view = self._view
        delayed = view.waiting.longest_delayed(view.prefilling)
        overtakes = view.carry.overtakes
        if delayed is not None:
            overtakes += sum(req.priority < delayed.priority for req in self._admit)
        passed = self.images.passed_over(view.carry.passed, chain(self._prefilling, view.waiting))
        return StepPlan(
            decode,
            self._room.grown,
            self._room.counts,
            self.chunks,
            self._admit,
            seen=self._seen,
            preempt=victim,
            carry=Carry(overtakes, paused_steps, passed),
            load=self._load,
            encode=self.images.parts,
        )

    def _add_chunk(self, req: Req, budget: int) -> None:
        """Add up to `budget` tokens to the chunk of an admitted request. Images take a part."""
        if budget <= 0:
            return
        hit, chosen = self._admit.get(req), self.chunks.get(req, 0)
        start, end = self._view.rest(req) if hit is None else (hit.tokens, len(req.tokens))
        most = self.images.limit(req, start, end, chosen + budget)
        tokens = self.images.whole(req, start, self._room.cut(row_of(req), start, most))
        tokens = max(tokens - chosen, 0)
        if tokens:
            self.chunks[req] = chosen + tokens
        self.left -= tokens + self.images.add(req, start, chosen + tokens, budget - tokens)

    def _make_room(self, req: Req) -> Req | None:
        """Choose a request of a later priority or of a client above its share, so that `req` runs.

        Returns None if there is none, or if the rows that end with the step in flight may suffice.
        """
        rows, running = self._view.table.rows, self._view.running(self._prefilling)
        if rows.num_quarantined or rows.size - self._rows_left > len(running):
            return None
        return self._shares.victim(req, running, self._rows_left)

    def _block(self, req: Req, is_within: bool) -> None:
        """Remember `req`, which found no room, if another request may be preempted for it."""
        if is_within or self._last_priority > req.priority:
            self._blocked = self._blocked or req


def row_of(req: Req) -> int:
    """Return the row of a request; a negative number in its place if the plan admits it."""
    return ~req.arrival_index if req.row < 0 else req.row
