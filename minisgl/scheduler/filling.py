"""`Filling`: adds prompts to the step that a plan makes."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from minisgl.kvcache import Hit, Room
from minisgl.scheduler.budget import MIN_CHUNK_TOKENS, further_tokens
from minisgl.scheduler.images import ImageRoom
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_DEFERRED = 64  # requests of a client that one round of a plan skips at most, to limit its time
FURTHER_SHARE = 1.1  # a step with further choices takes this many times the step without, or more
MAX_LOADING = 4  # requests whose prefixes are loaded from host memory at a time
MAX_PASSED = 8  # steps in a row that pass a request over, because its image exceeds their budget
RESERVED_ROWS = 16  # one of this many rows stays free for the first priority in use


class Filling:
    """Fills one step with prompts. All counters are local to a plan."""

    def __init__(self, view: View, room: Room, victim: Req | None, divides: bool) -> None:
        """divides: as for ImageRoom."""
        self._view, self._room = view, room
        least = max(MIN_CHUNK_TOKENS, view.memory.page_size)
        self._images = ImageRoom(view.images, least, divides)
        self._victim = victim
        self.prefilling = [req for req in view.prefilling if req is not self._victim]
        self.urgent = view.has_urgent(self.prefilling)
        self._shares = view.shares()
        rows, priority = view.table.rows, view.table.priority
        self._last_priority = priority.max(where=rows.allocated, initial=-(2**31))
        self._rows_left, self._reserved_rows = rows.num_free, rows.size // RESERVED_ROWS
        self._delayed = view.waiting.longest_delayed(view.prefilling)
        self._overtakes = view.carry.overtakes
        self.chunks: dict[Req, int] = {}
        self._admit: dict[Req, Hit] = {}
        self._load: list[Req] = []
        self._seen: list[Req] = []
        # The first request that found no room, although its client is within its share or a
        # request of a later priority runs.
        self._blocked: Req | None = None
        # The calls whose further choices get fewer tokens, and the tokens of a step with them.
        self._decoding_calls: set[int] = set()
        self._further_tokens = 0

    def resume(self, budget: int) -> int:
        """Continue the image that the newest step left. Returns the prompt tokens that are left."""
        reqs = ((req, int(self._view.table.computed[req.row])) for req in self.prefilling)
        others = len(self.prefilling) > 1 or bool(self._view.waiting)
        return self._images.resume(reqs, budget, others)

    def finish(self, budget: int) -> None:
        """Give the prompt tokens that no prompt uses to the image of `resume`."""
        self._images.finish(budget)

    @property
    def passed_too_often(self) -> Req | None:
        """The request that MAX_PASSED steps in a row passed over."""
        carry = self._view.carry
        return carry.passed if carry.passed_steps >= MAX_PASSED else None

    def take_passed(self, req: Req, budget: int, admit: bool) -> int:
        """Add the first chunk of the step for this request. Returns its tokens and price."""
        if req in self.prefilling:
            return self._add_chunk(req, budget)
        return self._admit_from(req.priority, req.client, budget) if admit else 0

    def has_urgent_work(self) -> bool:
        """The step has a chunk, or layers of an image, of the first priority in use."""
        is_first = self._view.waiting.is_first
        return any(map(is_first, self.chunks)) or any(
            is_first(req) and self._images.encodes(req) for req in self.prefilling
        )

    def limit_further(self, decode: Decode) -> None:
        """Limit the tokens of further choices beside these decoding rows, if others may wait."""
        if len(self._view.waiting.clients) > 1:
            reqs = map(self._view.table.req_at, decode.rows.tolist())
            self._decoding_calls = {req.call for req in chain(reqs, self._view.paused)}
            self._further_tokens = further_tokens(self._view, self.prefilling, decode)

    def beside_urgent(self, decode: Decode) -> Decode:
        """The decoding rows that run beside prompts of the first priority."""
        waiting = self._view.waiting
        if not (waiting.several_priorities and self.urgent):
            return decode
        return decode.only(self._view.table.priority[decode.rows] <= waiting.first_priority)

    def of_new_clients(self, decode: Decode, budget: int, admit: bool) -> StepPlan | int:
        """Return a step of the first prompts of clients that receive no tokens.

        Returns a number if the step would leave nothing out, if the budget does not suffice for
        their ends, or if the step before was such a step: the prompt tokens that are used.
        """
        view, req_at = self._view, self._view.table.req_at
        decoding = map(req_at, view.decode_rows.tolist())
        served = {req.client for req in chain(decoding, view.paused)}
        keys = self._prompts()
        first = {key: self._first_tokens(*key) for key in keys if key[1] not in served}
        needed = sum(first.values())
        if not 0 < needed <= budget or view.waiting.several_priorities or view.carry.paused_steps:
            return 0
        calls = [req_at(row).call for row in decode.rows.tolist()]
        kept = np.zeros(len(calls), dtype=np.bool_)
        kept[np.unique(calls, return_index=True)[1]] = True
        fewer = decode.only(kept)
        works = view.work(decode), view.work(fewer)
        whole_s, fewer_s = (
            view.cost.predict_s(work._replace(tokens=needed + work.tokens)) for work in works
        )
        beside = fewer if whole_s > FURTHER_SHARE * fewer_s else decode
        if beside is decode and len(first) == len(keys):
            return 0
        used = 0
        for level, clients in self.levels():
            for client in clients:
                used += self.take(level, client, first.get((level, client), 0), admit)
        return self.plan(beside, 1) if self.chunks else used

    def _first_tokens(self, level: int, client: str) -> int:
        """The prompt tokens that the first prompt of this client and priority has left.

        The price of its images is added.
        """
        table = self._view.table
        for req in self.prefilling:
            if (req.priority, req.client) == (level, client):
                start, end = int(table.computed[req.row]), int(table.prefill_end[req.row])
                return end - start + self._images.price(req, start)
        req = next(self._view.waiting.of(client, level))
        start = len(req.tokens) - req.uncached_tokens
        return req.uncached_tokens + self._images.price(req, start)

    def _prompts(self) -> set[tuple[int, str]]:
        """The priorities and clients with prompts."""
        return {*self._view.waiting.uncached, *((r.priority, r.client) for r in self.prefilling)}

    def levels(self) -> Iterator[tuple[int, list[str]]]:
        """The priorities with prompts in their order, each with its clients in their order."""
        keys = self._prompts()
        for level in sorted({level for level, _ in keys}):
            yield level, self._shares.in_order(client for of, client in keys if of == level)

    def waits(self, level: int, clients: Iterable[str]) -> bool:
        """A request of this priority stays in the queue."""
        waiting, admitted = self._view.waiting, [*self._admit]
        return any(True for client in clients for _ in waiting.of(client, level, admitted))

    def take(self, level: int, client: str, budget: int, admit: bool) -> int:
        """Add up to `budget` prompt tokens of one client and priority to the step.

        Returns the number of tokens.
        """
        left = budget
        for req in self.prefilling:
            if left > 0 and (req.client, req.priority) == (client, level):
                left -= self._add_chunk(req, self._most(req, left))
        used = self._admit_from(level, client, left) if admit and left > 0 else 0
        return budget - left + used

    def _admit_from(self, level: int, client: str, budget: int) -> int:
        """Admit requests of one client and priority, as `take`.

        While a request of another client is blocked, only requests within their client's share are
        admitted. A request waits too if images leave it less than the smallest chunk: it would hold
        a row and pages.
        """
        left, deferred = budget, 0
        for req in self._view.waiting.of(client, level, [*self._admit]):
            if self._most(req, left) <= 0:
                break
            pages = self._view.memory.pages_for(len(req.tokens))
            within = self._shares.is_within(req, pages)
            reserved = 0 if self._view.waiting.is_first(req) else self._reserved_rows
            if self._rows_left <= reserved or not (within or self._blocked is None):
                self._block(req, within)
                break
            hit = self._view.memory.hit(req)
            self._seen.append(req)
            others = (r for r in chain(self._view.uncached, self._admit) if r is not self._victim)
            if self._view.shared_with_older(req, hit.tokens, others)[0]:
                deferred += 1
                if deferred == MAX_DEFERRED:
                    break
                continue
            loads = not req.loaded and self._view.memory.loads(hit)
            if loads and len(self._view.loading) + len(self._load) == MAX_LOADING:
                deferred += 1
                if deferred == MAX_DEFERRED:
                    break
                continue
            busy = bool(self.chunks or self._images.parts)
            if busy and not loads and self._images.wait(req, hit.tokens, left):
                break
            if not self._room.open(placeholder_row(req), req, hit, loads):
                self._block(req, within)
                break
            if loads:
                self._load.append(req)
                continue
            self._shares.record_admitted(req, pages)
            self._overtakes += self._delayed is not None and self._delayed.priority > level
            self._rows_left -= 1
            self._last_priority = max(self._last_priority, level)
            self._admit[req] = hit
            self.prefilling.append(req)
            left -= self._add_chunk(req, self._most(req, left))
            if left <= 0:
                break
        return budget - left

    def _most(self, req: Req, left: int) -> int:
        """Return the most tokens of `left` that the request may use.

        Further choices may use as many as the other prompts, so that these do not stop them.
        """
        if not self._is_further(req):
            return left
        used = sum(tokens for other, tokens in self.chunks.items() if self._is_further(other))
        first = sum(self.chunks.values()) - used
        most = max(self._further_tokens - first, first) - used
        return max(min(left, most), 0)

    def _is_further(self, req: Req) -> bool:
        """The request has prompt tokens of a call that decodes.

        Forced tokens are none. A preempted request computes a part of its tokens again.
        """
        again = req.row < 0 or req in self._view.uncached
        return req.call in self._decoding_calls and (again or not req.prefill_done)

    def plan(self, decode: Decode, paused_steps: int = 0) -> StepPlan:
        """Return the step. paused_steps: as in Carry."""
        victim = self._victim
        if victim is None and self._blocked is not None:
            victim = self._make_room(self._blocked)
        if victim is not None:
            decode = decode.only(decode.rows != victim.row)
            self.chunks.pop(victim, None)
        carry = Carry(self._overtakes, paused_steps, *self._passed())
        found = StepPlan(decode, self._room.grown, self._room.counts, self.chunks, self._admit)
        found = found._replace(seen=self._seen, preempt=victim, carry=carry, load=self._load)
        return found._replace(encode=self._images.parts)

    def _passed(self) -> tuple[Req | None, int]:
        """Carry.passed and passed_steps."""
        before, steps = self._view.carry.passed, self._view.carry.passed_steps
        prompts = chain(self.prefilling, self._view.waiting)
        if before is not None and before not in self.chunks and before in prompts:
            return before, steps + 1
        passed = next((req for req in self._images.passed if req not in self.chunks), None)
        return passed, int(passed is not None)

    def _add_chunk(self, req: Req, budget: int) -> int:
        """Add up to `budget` tokens to the chunk of an admitted request.

        Returns their number and the price of the images that the step encodes for the request.
        """
        if budget <= 0:
            return 0
        table, chosen, row = self._view.table, self.chunks.get(req, 0), req.row
        if req in self._admit:
            row, start, end = placeholder_row(req), self._admit[req].tokens, len(req.tokens)
        else:
            start, end = int(table.computed[row]), int(table.prefill_end[row])
        most = self._images.limit(req, start, end, chosen + budget)
        tokens = max(self._images.whole(req, start, self._room.cut(row, start, most)) - chosen, 0)
        if tokens:
            self.chunks[req] = chosen + tokens
        return tokens + self._images.add(req, start, chosen + tokens, budget - tokens)

    def _make_room(self, req: Req) -> Req | None:
        """Choose a request of a later priority or of a client above its share, so that `req` runs.

        Returns None if there is none, or if the rows that end with the step in flight may suffice.
        """
        table = self._view.table
        running = self._view.running(self.prefilling)
        allocated = int(table.rows.allocated.sum()) + len(self._admit)
        if table.rows.num_quarantined or allocated > len(running):
            return None
        return self._shares.victim(req, running, self._rows_left)

    def _block(self, req: Req, is_within: bool) -> None:
        """Remember `req`, which found no room, if another request may be preempted for it."""
        if is_within or self._last_priority > req.priority:
            self._blocked = self._blocked or req


def placeholder_row(req: Req) -> int:
    """Return a number in place of the row of a request that the plan admits."""
    return ~req.arrival_index
