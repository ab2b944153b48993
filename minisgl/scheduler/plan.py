"""`plan`: chooses the requests of the next step and the number of tokens of each.

A plan is a function of the View, and changes nothing. All tensor-parallel ranks therefore plan the
same steps, and a test can compare the state before and after a plan. `apply` carries a plan out.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import DecodeLoad, Int32Array
from minisgl.core.config import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.kvcache import Hit, Room
from minisgl.scheduler.budget import MIN_CHUNK_TOKENS, further_tokens, prompt_tokens
from minisgl.scheduler.images import ImageRoom
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_DEFERRED = 64  # requests of a client that one round of a plan skips at most, to limit its time
MAX_PAUSES = 8  # steps in a row that leave decoding requests of later priorities out
FURTHER_SHARE = 1.1  # a step with further choices takes this many times the step without, or more
MAX_LOADING = 4  # requests whose prefixes are loaded from host memory at a time
RESERVED_ROWS = 16  # one of this many rows stays free for the first priority in use


class Shortage(NamedTuple):
    """Rows find no pages. victim: the request to preempt; None if the step in flight frees some."""

    victim: Req | None


def plan(view: View) -> StepPlan:
    """Plan the next step.

    1. Every decoding request computes its next token, and draft tokens. When pages of full
       attention run short, the step has no drafts, the oldest requests get the free pages, and the
       newest one is preempted. When another kind of memory runs short, a request gets fewer drafts,
       or leaves the step.
    2. Admitted prompts get chunks, in order of admission, up to `prompt_tokens`.
    3. Waiting requests are admitted, in the order of the queue, while prompt tokens, a row and
       pages are left. A request waits while an older request computes a prefix that both share.

    Requests with a lower priority number come first in all three parts: they get prompt tokens and
    rows before the others, and if rows or pages are short, the others are preempted for them. A
    step with prompts of the first priority in use leaves decoding requests of the others out. At
    most MAX_PAUSES steps in a row leave them out (docs/decisions/24-priorities.md).

    If several clients have prompts of one priority, each may first use an equal part of the
    step's prompt tokens. Then each client in turn may use all unused tokens. If rows or pages are
    short, Shares decides (docs/decisions/20-clients-in-turn.md). Further choices of a call that
    decodes get fewer tokens, as prompts of later priorities do: another client may wait for the end
    of the step, and the client of the call receives tokens already.

    A client that receives no tokens waits for the step in flight and for one more: a step that ends
    its first prompt has no other prompts, and no further choices that decode, if these take long.
    The next step has them.
    """
    memory, none = view.memory, view.decode_rows[:0]
    room = Room(memory, memory.available, [kind.room() for kind in memory.kinds], none, none)
    decode, short = decoding(view, room)
    if short is None and not (view.prefilling or view.waiting.uncached):  # no Python loop
        return StepPlan(decode, room.grown, room.counts, carry=Carry(view.carry.overtakes))
    fill = Filling(view, room, short, divides=len(decode.rows) > 0)
    beside = fill.beside_urgent(decode)
    left = fill.resume(prompt_tokens(view, fill.prefilling, beside, fill.urgent))
    fill.limit_further(beside)
    admit = short is None
    own = fill.of_new_clients(decode, left, admit) if len(view.waiting.clients) > 1 else None
    if own is not None:
        return own
    for level, clients in fill.levels():
        for part in [left // len(clients), left] if len(clients) > 1 else [left]:
            for client in clients:
                left -= fill.take(level, client, min(part, left), admit)
        admit = admit and not fill.waits(level, clients)
    urgent_chunks = any(map(view.waiting.is_first, fill.chunks))
    if urgent_chunks and beside is not decode and view.carry.paused_steps < MAX_PAUSES:
        return fill.plan(beside, view.carry.paused_steps + 1)
    return fill.plan(decode)


def decoding(view: View, room: Room) -> tuple[Decode, Shortage | None]:
    """Return the decoding rows with pages for their next tokens, and why others have none."""
    rows = view.decode_rows
    # Each row first gets room for its next token in every further kind. Rows without it leave the
    # step. Drafts take the memory that is then left. Without full pages for all of them there are
    # no drafts.
    for kind in room.kinds:
        rows = rows[kind.grow(rows, np.ones(len(rows), dtype=np.int32)) > 0]
    decode = with_drafts(view, rows) if view.max_drafts else None
    if decode is not None and not len(room.grow(rows, tokens_ahead(view, decode))):
        for kind in room.kinds:
            decode = decode._replace(tokens=kind.grow(rows, decode.tokens))
    else:
        decode = Decode(rows, np.ones(len(rows), dtype=np.int32))
        growing = room.grow(rows, decode.tokens)
        if len(growing):
            return shortage(view, room, decode, growing)
    return decode, None if len(rows) == len(view.decode_rows) else Shortage(None)


def with_drafts(view: View, rows: Int32Array) -> Decode | None:
    """Return these rows with the tokens of each in a step with drafts; None if it has none.

    The engine finds and checks the drafts on the device, so the host learns one step later how many
    tokens a step gave to a request. Until then it counts all drafts as accepted: table.computed is
    an upper bound, and a request has pages up to it. Nothing is rolled back when drafts are
    rejected. The row keeps its pages, and the next step overwrites the keys and values.
    Drafts end before the last token that the request may forward.

    A step without prompts may also let the draft head make drafts for the next step. The lengths
    know how many it has made for this one, since without them only n-grams can give drafts.
    """
    table = view.table
    may_draft = table.may_draft[rows]
    if not may_draft.any():
        return None
    computed, fitting = table.computed[rows], MAX_DRAFT_TOKENS // len(rows)
    limit = max(width for width in DRAFT_WIDTHS if width <= max(fitting, 1)) - 1
    cost = None if view.has_prompts else view.cost
    asked, made = rows[may_draft], int(table.made[rows[may_draft]].max())
    load = DecodeLoad(asked, len(rows), int(computed.sum()), limit, cost, made)
    counts = view.lengths.choose(load)
    tokens: Int32Array = np.where(may_draft, 1 + counts.forwarded, 1).astype(np.int32)
    tokens = np.minimum(tokens, table.max_total_tokens[rows] - 1 - computed)
    return Decode(rows, tokens, counts.made) if counts.made or tokens.max() > 1 else None


def tokens_ahead(view: View, decode: Decode) -> Int32Array:
    """Return the tokens of each row whose keys need pages: those of the step and the new drafts."""
    if not decode.next_drafts:
        return decode.tokens
    left = view.table.max_total_tokens[decode.rows] - view.table.computed[decode.rows]
    tokens: Int32Array = np.minimum(decode.tokens + decode.next_drafts, left)
    return tokens


def shortage(
    view: View, room: Room, decode: Decode, growing: Int32Array
) -> tuple[Decode, Shortage]:
    """Give the pages that are left to the oldest requests. The newest one is preempted.

    growing: int32; those of the decoding rows that need a page.
    """
    table, shares = view.table, view.shares()
    ages = {row: shares.age(table.req_at(row)) for row in growing.tolist()}
    oldest_first: Int32Array = np.array(sorted(ages, key=ages.__getitem__), dtype=np.int32)
    starved = oldest_first[room.available :]
    decode = decode.only(~np.isin(decode.rows, starved))
    room.grow(decode.rows, decode.tokens)
    # Requests without room in another kind of memory are not in `decode`, but can be preempted.
    running = view.running(view.prefilling)
    # The step in flight frees pages when it is resolved. If it has drafts of the starved rows, and
    # rejects them, no page is missing either.
    drafted = (table.computed[starved] > table.known[starved]).all()
    waits = view.memory.pending >= len(starved) or drafted
    if waits or (len(running) == 1 and view.in_flight):
        return decode, Shortage(None)
    if len(running) == 1:
        raise InvariantBroken("no page is left for the only running request; this is a bug")
    victim = max(running, key=shares.age)
    return decode.only(decode.rows != victim.row), Shortage(victim)


class Filling:
    """Fills one step with prompts. All counters are local to a plan."""

    def __init__(self, view: View, room: Room, short: Shortage | None, divides: bool) -> None:
        """divides: as for ImageRoom."""
        self._view, self._room = view, room
        least = max(MIN_CHUNK_TOKENS, view.memory.page_size)
        self._images = ImageRoom(view.images, least, divides)
        self._victim = None if short is None else short.victim
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
        return self._images.resume(reqs, budget)

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

    def of_new_clients(self, decode: Decode, budget: int, admit: bool) -> StepPlan | None:
        """Return a step of the first prompts of clients that receive no tokens.

        Returns None if it would leave nothing out, if the budget does not suffice for their ends,
        or if the step before was such a step.
        """
        view, req_at = self._view, self._view.table.req_at
        decoding = map(req_at, view.decode_rows.tolist())
        served = {req.client for req in chain(decoding, view.paused)}
        keys = self._prompts()
        first = {key: self._first_tokens(*key) for key in keys if key[1] not in served}
        needed = sum(first.values())
        if not 0 < needed <= budget or view.waiting.several_priorities or view.carry.paused_steps:
            return None
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
            return None
        for level, clients in self.levels():
            for client in clients:
                self.take(level, client, first.get((level, client), 0), admit)
        return self.plan(beside, 1) if self.chunks else None

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

        While a request of another client is blocked, only requests within their client's share are
        admitted. A request waits too if images leave it less than the smallest chunk: it would hold
        a row and pages. Returns the number of tokens.
        """
        left, deferred = budget, 0
        for req in self.prefilling:
            if left > 0 and (req.client, req.priority) == (client, level):
                left -= self._add_chunk(req, self._most(req, left))
        queue = self._view.waiting.of(client, level, [*self._admit])
        for req in queue if admit and left > 0 else ():
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
        carry = Carry(self._overtakes, paused_steps)
        found = StepPlan(decode, self._room.grown, self._room.counts, self.chunks, self._admit)
        found = found._replace(seen=self._seen, preempt=victim, carry=carry, load=self._load)
        return found._replace(encode=self._images.parts)

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
