"""`Planner`: chooses the requests of the next step and the number of tokens of each.

A plan depends only on the scheduler's state, not on a clock, randomness or I/O, so that all
tensor-parallel ranks plan the same steps.
"""

from itertools import chain, islice

import numpy as np

from minisgl.core import Batch, Int32Array, InvariantBroken, SchedulerConfig, StepCost, StepResult
from minisgl.scheduler.budget import PrefillBudget
from minisgl.scheduler.drafts import DraftPlanner
from minisgl.scheduler.kv_manager import KVManager
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.sharing import ClientShares

MAX_DEFERRED = 64  # requests of a client that one round of a plan skips at most, to limit its time
MAX_OVERTAKES = 64  # admissions that overtake an older request before that request comes first
MAX_PAUSES = 8  # steps in a row that leave decoding requests of later priorities out
RESERVED_ROWS = 16  # one of this many rows stays free for the first priority in use


class Planner:
    """Chooses the requests and the tokens of each step, and owns the queues of the requests.

        waiting  --admit-->  prefilling  --last chunk launched-->  decoding
           ^                     |                                    |
           +----------------- preempt --------------------------------+
                                 ^----------- forced tokens ----------+

    A plan has three parts:

    1. Every decoding request computes its next token, and draft tokens (DraftPlanner). When pages
       run short, the step has no drafts, the oldest requests get the free pages, and the planner
       preempts the newest running request.
    2. Admitted prompts get chunks, in order of admission, until the step's prompt tokens are used
       up (PrefillBudget).
    3. Waiting requests are admitted, in the order of the queue, while prompt tokens, a row and
       pages are left. The planner skips a waiting request while an older request computes a
       prefix that both share (in-batch prefix sharing).

    Requests with a lower priority number come first in all three parts: they get prompt tokens and
    rows before the others, and if rows or pages are short, the planner preempts the others for
    them. A step with prompts of the first priority in use leaves decoding requests of the others
    out. At most MAX_PAUSES steps in a row leave them out. After MAX_OVERTAKES admissions that
    overtook an older request, the first admitted prompt of the others, or else the oldest request
    in the queue, gets the first priority in use (docs/decisions/24-priorities.md).

    If several clients have prompts of one priority, each may first use an equal part of the
    step's prompt tokens. Then each client in turn may use all unused tokens. If rows or pages are
    short, ClientShares decides (docs/decisions/20-clients-in-turn.md).

    waiting      the requests of each client in the order of service.
    prefilling   admitted requests with prompt tokens or forced tokens that are not launched yet.
    decode_rows  int32, rows of the decoding requests.
    cost         predicts step times.

    I1  A request is in exactly one place: waiting, prefilling, decoding, or in state ENDING.
    I2  decode_rows holds the decoding requests with a step left to launch, in the order in which
        they began to decode.
    I3  uncached holds the running requests whose prompt is not in the prefix cache yet, in order
        of admission.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_manager: KVManager,
        drafts: DraftPlanner | None,
        cost: StepCost,
    ) -> None:
        self._drafts = drafts
        self._kv_manager = kv_manager
        self._table = table = kv_manager.table
        self.cost = cost
        self.waiting = WaitingQueue()
        self._shares = ClientShares(table, kv_manager.pool.size)
        self.prefilling: list[Req] = []
        self._budget = PrefillBudget(
            config, table, self.prefilling, self.waiting, self._shares.clients
        )
        self._overtakes = 0
        self._delayed: Req | None = None  # WaitingQueue.longest_delayed
        # The first request of a plan that found no row or no pages, although its client is within
        # its share or a request of a later priority runs.
        self._blocked: Req | None = None
        self._pauses = 0  # steps in a row without the decoding requests of later priorities
        self.uncached: dict[Req, None] = {}  # a dict and not a set, because it keeps the order
        self.decode_rows: Int32Array = np.empty(0, dtype=np.int32)

    def predict_s(self, batch: Batch) -> float:
        """Predict the seconds of a batch."""
        return self.cost.predict_s(*batch.work())

    def plan(self, step_id: int, in_flight: bool) -> tuple[Batch | None, Req | None]:
        """Plan the next step.

        in_flight: True while a launched step has no result yet. Its result may free pages.
        Returns the batch (None when no request can run now) and a request to preempt (None when
        rows and pages suffice). The planner has already removed that request from the running ones.
        """
        self._shares.measure(self.waiting.clients)
        rows, victim = self._decode_rows_with_pages(in_flight)
        starved = victim is not None or len(rows) < len(self.decode_rows)
        first_rows = self._of_first_priority(rows)
        chunks = self._choose_chunks(first_rows, admit=not starved)
        has_first = any(map(self._is_first, map(self._table.req_at, chunks)))
        pauses = has_first and len(first_rows) < len(rows) and self._pauses < MAX_PAUSES
        self._pauses = self._pauses + 1 if pauses else 0
        rows = first_rows if pauses else rows
        if self._blocked is not None and victim is None:
            victim = self._make_room(self._blocked)
            if victim is not None:
                rows = rows[rows != victim.row]
                chunks.pop(victim.row, None)
        if len(rows) or chunks:
            return self._table.build_batch(step_id, rows, chunks), victim
        if self.waiting and not in_flight and victim is None:
            raise InvariantBroken(
                "no request runs, but no waiting request can be admitted; this is a bug"
            )
        return None, victim

    @property
    def has_urgent_prompts(self) -> bool:
        """A prompt of the first priority in use has no first token yet."""
        return any(level <= self.waiting.highest_class for level in self._levels())

    def record_launch(self, batch: Batch) -> None:
        """Record that `batch` was launched: advance the lengths of its requests.

        Requests whose last chunk the batch contains begin to decode. Requests whose last token the
        batch samples need no further step, so they leave decode_rows.
        """
        table = self._table
        table.computed[batch.rows] = batch.start + batch.lengths
        table.last_step[batch.rows] = batch.step_id
        chunk_rows = batch.rows[batch.num_decode :]
        entering = chunk_rows[table.computed[chunk_rows] >= table.prefill_end[chunk_rows]]
        for row in entering.tolist():
            req = table.req_at(row)
            self.prefilling.remove(req)
            req.state = ReqState.DECODE
        rows = np.concatenate([self.decode_rows, entering])
        samples_last_token = table.computed[rows] >= table.max_total_tokens[rows] - 1
        self.decode_rows = rows[~samples_last_token]

    def record_result(self, batch: Batch, result: StepResult) -> None:
        """Record the drafts of a resolved step; requests whose last drafts it rejected go on."""
        if self._drafts is not None:
            self._drafts.record(batch, result)
            self.decode_rows = self._drafts.resumed(batch, self.decode_rows)

    def recompute(self, req: Req) -> None:
        """Let a decoding request forward its forced tokens as a chunk of the next step.

        `req` comes before all prompts, because its client is receiving tokens.
        """
        self.decode_rows = self.decode_rows[self.decode_rows != req.row]
        self.prefilling.insert(0, req)
        req.state = ReqState.PREFILL

    def remove(self, req: Req) -> None:
        """Take `req` out of the running requests. `req` keeps its row and pages until `release`."""
        if req.state is ReqState.PREFILL:
            self.prefilling.remove(req)
        elif req.state is ReqState.DECODE:
            self.decode_rows = self.decode_rows[self.decode_rows != req.row]
        self.uncached.pop(req, None)
        req.state = ReqState.ENDING

    def enqueue(self, req: Req) -> None:
        """Put a new or a preempted request into the queue."""
        req.state = ReqState.WAITING
        self._shares.clients.add(req.client)
        cached = len(self._kv_manager.match(req).pages) * self._kv_manager.page_size
        others = chain(self.uncached, islice(reversed(self.waiting), MAX_DEFERRED))
        shared = self._kv_manager.shared_with_older(req, cached, others)
        req.uncached_tokens = len(req.tokens) - (shared or cached)
        self.waiting.append(req)

    # --- decode ---------------------------------------------------------------------------------

    def _decode_rows_with_pages(self, in_flight: bool) -> tuple[Int32Array, Req | None]:
        """Give each decoding row pages for its next token and its drafts.

        Returns the rows that have a page for the next token, and a request to preempt when pages
        are short.
        """
        table, kv_manager = self._table, self._kv_manager
        rows = self.decode_rows
        cost = None if self.prefilling or self.waiting else self.cost
        if self._drafts is not None and self._drafts.add(rows, cost):
            return rows, None
        rows = kv_manager.grow_windows(rows)
        growing = rows[table.computed[rows] // kv_manager.page_size >= table.pages.counts[rows]]
        if not len(growing):
            return rows, None
        pages = kv_manager.try_allocate(len(growing))
        if pages is not None:
            table.pages.append(growing, pages)
            return rows, None
        return self._allocate_to_oldest(rows, growing, in_flight)

    def _allocate_to_oldest(
        self, rows: Int32Array, growing: Int32Array, in_flight: bool
    ) -> tuple[Int32Array, Req | None]:
        """When pages run short, give them to the oldest requests and preempt the newest one.

        Among requests of one priority, those of a client that holds more than its share of the
        pages count as newer than all others.
        """
        req_at = self._table.req_at

        def age(req: Req) -> tuple[int, bool, int]:
            return req.priority, self._shares.is_over(req), req.arrival_index

        kv_manager = self._kv_manager
        oldest_first = sorted(growing.tolist(), key=lambda row: age(req_at(row)))
        in_order: Int32Array = np.array(oldest_first, dtype=np.int32)
        served, starved = np.split(in_order, [kv_manager.available])
        self._table.pages.append(served, kv_manager.allocate(len(served)))
        kept = rows[~np.isin(rows, starved)]
        if kv_manager.pending >= len(starved):
            return kept, None  # the step in flight frees enough pages when it is resolved
        if (self._table.computed[starved] > self._table.known[starved]).all():
            # The step in flight has drafts of these rows. If it rejects them, no page is missing.
            return kept, None
        # `rows` lacks the requests that wait for a window page, and these can be preempted too.
        running = [*self.prefilling, *map(req_at, self.decode_rows.tolist())]
        if len(running) == 1:
            if not in_flight:
                raise InvariantBroken("no page is left for the only running request; this is a bug")
            return kept, None
        victim = max(running, key=age)
        self.remove(victim)
        return kept[kept != victim.row], victim

    # --- prefill --------------------------------------------------------------------------------

    def _choose_chunks(self, decode_rows: Int32Array, admit: bool) -> dict[int, int]:
        """Return the number of prompt tokens of each row. admit: waiting requests may start.

        The budget goes to the priorities in their order. Each client with prompts of a priority
        may first use an equal part of the rest, and in a second round all that remains, in turn.
        While requests of one priority wait for room, no request of a later priority is admitted.
        The longest delayed request gets the first priority if it was overtaken too often.
        """
        self._blocked = None
        if not (self.prefilling or self.waiting):
            return {}
        self._delayed = self.waiting.longest_delayed(self.prefilling)
        if self._overtakes >= MAX_OVERTAKES and self._delayed is not None:
            self._overtakes = 0
            self.waiting.raise_to(self._delayed, self.waiting.highest_class)
        levels = self._levels()
        budget = self._budget.tokens(decode_rows, self.cost, self.has_urgent_prompts)
        chunks: dict[int, int] = {}
        for level in sorted(levels):
            clients = self._shares.in_order(levels[level])
            rounds = [budget // len(clients), budget] if len(clients) > 1 else [budget]
            for part in rounds:
                for client in clients:
                    budget -= self._fill(client, level, min(part, budget), chunks, admit)
            admit = admit and level not in self.waiting.levels
        return chunks

    def _levels(self) -> dict[int, set[str]]:
        """The clients with waiting or admitted prompts, by priority."""
        levels = self.waiting.levels
        for req in self.prefilling:
            levels[req.priority].add(req.client)
        return levels

    def _fill(
        self, client: str, level: int, budget: int, chunks: dict[int, int], admit: bool
    ) -> int:
        """Add up to `budget` prompt tokens of one client and priority to `chunks`.

        While a request of another client is blocked, only requests within their client's share are
        admitted. Returns the number of tokens.
        """
        left = budget
        for req in self.prefilling:
            if left > 0 and (req.client, req.priority) == (client, level):
                left -= self._add_chunk(req, left, chunks)
        admitted: list[Req] = []
        deferred = 0
        for req in self.waiting.of(client, level) if admit and left > 0 else ():
            pages = self._kv_manager.pages_for(len(req.tokens))
            is_within = self._shares.is_within(req, pages)
            rows = self._table.rows
            reserved = 0 if self._is_first(req) else rows.size // RESERVED_ROWS
            if rows.num_free <= reserved or not (is_within or self._blocked is None):
                self._block(req, is_within)
                break
            match = self._kv_manager.match(req)
            cached = len(match.pages) * self._kv_manager.page_size
            if self._kv_manager.shared_with_older(req, cached, self.uncached):
                deferred += 1
                if deferred == MAX_DEFERRED:
                    break
                continue
            if not self._kv_manager.try_admit(req, match):
                self._block(req, is_within)
                break
            if self._drafts is not None:
                self._drafts.lengths.open(req.row)
            self._shares.record_admitted(req, pages)
            self._overtakes += self._delayed is not None and self._delayed.priority > level
            admitted.append(req)
            if not req.admitted:
                req.admitted = True
                req.cached_tokens = cached
            req.state = ReqState.PREFILL
            self.prefilling.append(req)
            self.uncached[req] = None
            left -= self._add_chunk(req, left, chunks)
            if left <= 0:
                break
        for req in admitted:
            self.waiting.remove(req)
        return budget - left

    def _add_chunk(self, req: Req, budget: int, chunks: dict[int, int]) -> int:
        """Add up to `budget` tokens to the chunk of a running request. Returns their number."""
        chosen = chunks.get(req.row, 0)
        rest = int(self._table.prefill_end[req.row] - self._table.computed[req.row]) - chosen
        most = chosen + min(budget, rest)
        tokens = self._kv_manager.extend_window(req, most) - chosen
        if tokens:
            chunks[req.row] = chosen + tokens
        return tokens

    def _is_first(self, req: Req) -> bool:
        """The request has the first priority in use."""
        return req.priority <= self.waiting.highest_class

    def _of_first_priority(self, rows: Int32Array) -> Int32Array:
        """The decoding rows that run beside prompts of the first priority."""
        if not self.waiting.has_classes or not self.has_urgent_prompts:
            return rows
        is_first = [self._is_first(self._table.req_at(row)) for row in rows.tolist()]
        return rows if all(is_first) else rows[is_first]

    def _make_room(self, req: Req) -> Req | None:
        """Preempt a request of a later priority or of a client above its share, so that `req` runs.

        Returns None if there is none, or if the rows that end with the step in flight may suffice.
        """
        running = [*self.prefilling, *map(self._table.req_at, self.decode_rows.tolist())]
        rows = self._table.rows
        if rows.num_quarantined or int(rows.allocated.sum()) > len(running):
            return None
        victim = self._shares.victim(req, running)
        if victim is not None:
            self.remove(victim)
        return victim

    def _block(self, req: Req, is_within: bool) -> None:
        """Remember `req`, which found no room, if another request may be preempted for it."""
        others = (other for other in self._table.reqs if other is not None)
        if is_within or any(other.priority > req.priority for other in others):
            self._blocked = self._blocked or req
