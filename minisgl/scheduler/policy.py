"""Which reqs take part in the next step, and with how many tokens: the whole policy.

Decode first: every decoding req gets its token. Then prefill: chunks of admitted prompts in order
of admission, then new admissions from the head of the queue, within the token budget. A pure
function of the scheduler's state: no clock, no randomness, no I/O.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from minisgl.core import Batch, Int32Array, InvariantBroken, SchedulerConfig, StepCost, step_sizes
from minisgl.kvcache import common_prefix
from minisgl.scheduler.kv_manager import KVMemory
from minisgl.scheduler.logits_processing import edited_reqs, logprobs_request
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.request_table import RequestTable

MAX_DEFERRED = 64  # waiting reqs looked past in one plan, so that its cost stays bounded
MIN_SHARED_TOKENS = 64  # a shorter shared prefix is not worth a step of waiting
MIN_CHUNK_TOKENS = 32  # prefill never stands still, whatever a step is predicted to take
MOST_STRETCH = 2.25  # of a step with a chunk, over the same step without
LONG_QUEUE_S = 0.25  # of prefill alone; a queue n times as long lets a step take n times as much,
MOST_PATIENCE = 4.0  # but no more than that: streams still get some ten tokens a second
EVEN_TOKENS = 512  # of a step: larger ones take hardly less for each token (8B)


class Plan(NamedTuple):
    """batch: the next step, None when nothing can run now. victim: a req to preempt, which has
    left the running ones."""

    batch: Batch | None
    victim: Req | None


class Planner:
    """The queues and the choice. Owns who is waiting, in prefill and decoding.

    cost  predicts step times; None: nothing is known of them.

    I1  A req is in exactly one of: waiting, prefilling, decoding, or on its way out.
    I2  decode_rows: of decoding reqs with a step left to launch, in order of entering decode.
    I3  unpublished holds the running reqs whose prompt is not in the prefix cache yet.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVMemory,
        table: RequestTable,
    ) -> None:
        self._config = config
        self._memory = memory
        self._table = table
        self.cost: StepCost | None = None
        self._sizes = step_sizes(config.prefill_budget_tokens + table.rows.size + 1024)
        self.waiting: deque[Req] = deque()
        self.prefilling: list[Req] = []
        self.unpublished: dict[Req, None] = {}  # a set that keeps its order
        self.decode_rows: Int32Array = np.empty(0, dtype=np.int32)

    def decode_s(self, batch: Batch) -> float:
        """Predicted seconds of `batch`: too few where not all in it decode, 0 without prices."""
        keys = int(batch.start.sum())
        return 0.0 if self.cost is None else self.cost.predict_s(batch.num_reqs, keys, 0)

    def plan(self, step_id: int, in_flight: bool) -> Plan:
        """Choose the next step. in_flight: a result is to come, so memory may free itself."""
        rows, victim = self._decode_rows_with_pages(in_flight)
        starved = victim is not None or len(rows) < len(self.decode_rows)
        chunks = self._choose_chunks(rows, admit=not starved)
        if not len(rows) and not chunks:
            return Plan(None, victim)
        return Plan(self._build(step_id, rows, chunks), victim)

    def leave(self, req: Req) -> None:
        """Take `req` out of the running lists; its row and pages stay until released."""
        if req.state is ReqState.PREFILL:
            self.prefilling.remove(req)
        elif req.state is ReqState.DECODE:
            self.decode_rows = self.decode_rows[self.decode_rows != req.row]
        self.unpublished.pop(req, None)
        req.state = ReqState.ENDING

    def enqueue(self, req: Req) -> None:
        """`req` waits: a new one after all others, a preempted one before all that never ran."""
        req.state = ReqState.WAITING
        cached = len(self._memory.match(req).pages) * self._memory.page_size
        others = chain(self.unpublished, islice(reversed(self.waiting), MAX_DEFERRED))
        req.to_compute = len(req.tokens) - (self._shared_with_older(req, cached, others) or cached)
        if req.admitted:
            self.waiting.appendleft(req)
        else:
            self.waiting.append(req)

    # --- decode ---------------------------------------------------------------------------------

    def _decode_rows_with_pages(self, in_flight: bool) -> tuple[Int32Array, Req | None]:
        """Decode rows that have a page for their next token; where pages are short, those of the
        oldest reqs, and a req to preempt."""
        table, memory = self._table, self._memory
        rows = self.decode_rows
        short = rows[table.computed[rows] // memory.page_size >= table.pages.counts[rows]]
        if not len(short):
            return rows, None
        pages = memory.try_allocate(len(short))
        if pages is not None:
            table.pages.append(short, pages)
            return rows, None
        return self._share_out(rows, short, in_flight)

    def _share_out(
        self, rows: Int32Array, short: Int32Array, in_flight: bool
    ) -> tuple[Int32Array, Req | None]:
        """Too few pages: the oldest get what there is, the newest running req has to go."""
        req_at, pool = self._table.req_at, self._memory.pool
        oldest = sorted(short.tolist(), key=lambda row: req_at(row).serial)
        served, starved = np.split(np.array(oldest, dtype=np.int32), [pool.num_free])
        self._table.pages.append(served, pool.allocate(len(served)))
        kept = rows[~np.isin(rows, starved)]
        if pool.num_quarantined >= len(starved):
            return kept, None  # a step in flight frees enough
        running = [*self.prefilling, *map(req_at, rows.tolist())]
        if len(running) == 1:
            if not in_flight:
                raise InvariantBroken("the only running req finds no page; this is a bug")
            return kept, None
        victim = max(running, key=lambda req: req.serial)
        self.leave(victim)
        return kept[kept != victim.row], victim

    # --- prefill --------------------------------------------------------------------------------

    def _choose_chunks(self, decode_rows: Int32Array, admit: bool) -> dict[int, int]:
        """How many prompt tokens are next, by row."""
        budget = self._chunk_budget(decode_rows)
        chunks: dict[int, int] = {}
        for req in self.prefilling:
            if budget > 0:
                budget -= self._take(req.row, budget, chunks)
        deferred: list[Req] = []
        while admit and budget > 0 and self.waiting and self._table.rows.num_free:
            req = self.waiting[0]
            match = self._memory.match(req)
            cached = len(match.pages) * self._memory.page_size
            if self._shared_with_older(req, cached, self.unpublished):
                deferred.append(self.waiting.popleft())
                if len(deferred) == MAX_DEFERRED:
                    break
                continue
            if not self._memory.try_admit(req, match, self._table):
                break
            self._admit(self.waiting.popleft())
            budget -= self._take(req.row, budget, chunks)
        self.waiting.extendleft(reversed(deferred))
        return chunks

    def _shared_with_older(self, req: Req, cached: int, others: Iterable[Req]) -> int:
        """How much of its prompt one of `others` computes for `req`: at least half of what is not
        cached, or 0, since it does not wait for less.

        So the siblings of one prompt, and a burst behind one system prompt, compute it once. It
        waits for older reqs only: newer ones that overtake it and fail could go on for ever.
        """
        if self._config.cache_type == "naive" or req.sampling.prompt_logprobs is not None:
            return 0
        page_size, half = self._memory.page_size, (len(req.tokens) - cached + 1) // 2
        least = self._memory.pages_for(cached + max(half, MIN_SHARED_TOKENS)) * page_size
        mark = req.tokens[least - 1 : least].tobytes()  # where most others differ
        for other in others if mark else ():  # none: too short for any to save it half
            older = other.serial < req.serial and other.cache_salt == req.cache_salt
            if older and other.tokens[least - 1 : least].tobytes() == mark:
                shared = common_prefix(req.tokens[:-1], other.tokens)
                if shared >= least:
                    return shared // page_size * page_size
        return 0

    def _admit(self, req: Req) -> None:
        if not req.admitted:
            req.admitted, req.cached_tokens = True, int(self._table.computed[req.row])
        req.state = ReqState.PREFILL
        self.prefilling.append(req)
        self.unpublished[req] = None

    def _take(self, row: int, budget: int, chunks: dict[int, int]) -> int:
        chunks[row] = min(budget, int(self._table.prefill_end[row] - self._table.computed[row]))
        return chunks[row]

    def _chunk_budget(self, decode_rows: Int32Array) -> int:
        """Prompt tokens of this step: all of the budget, or fewer beside decoding. With a step-time
        target its time is limited; without one only the whole counts, and even steps may win."""
        budget, target_ms = self._config.prefill_budget_tokens, self._config.target_step_ms
        cost = self.cost
        if not len(decode_rows) or cost is None or not (self.prefilling or self.waiting):
            return budget
        if target_ms is None:
            return min(self._even_budget(decode_rows, cost), budget)
        return min(self._timed_budget(decode_rows, cost, target_ms), budget)

    def _even_budget(self, decode_rows: Int32Array, cost: StepCost) -> int:
        """Decoding for few reqs reads all weights for little, so prompts of reqs that end early
        ride along with it, in steps of even size, instead of going first.

        The size is the least at which no req ends later than the one with the furthest limit,
        should each reach its own: what stands before a req in the queue, and its own prompt, is
        computed by the time it has to begin. That takes a row for each who waits, and tokens that
        cost less beside decoding than in a large step of their own: a small model's do not.
        """
        budget, table, n = self._config.prefill_budget_tokens, self._table, len(decode_rows)
        if len(self.waiting) > table.rows.num_free:
            return budget
        begun = np.array([req.row for req in self.prefilling], dtype=np.int32)
        queue = [(req.to_compute, req.limit - len(req.tokens)) for req in self.waiting]
        waiting, most = np.array(queue or [(0, 0)]).T  # nobody waits: one of nothing
        outputs = np.concatenate([table.limit[begun] - table.prefill_end[begun], most])
        to_compute = np.concatenate([table.prefill_end[begun] - table.computed[begun], waiting])
        longest = (table.limit[decode_rows] - table.computed[decode_rows]).max()
        steps = np.maximum(max(longest, outputs.max()) - outputs, 1)
        needed = min(int((to_compute.cumsum() // steps).max()) + 1, budget)
        needed = max(needed, EVEN_TOKENS // 2)  # a prompt never stands still, however many decode
        size = self._sizes[bisect_left(self._sizes, max(n + needed, EVEN_TOKENS))]
        beside_s = cost.predict_s(size, 0, 0) - cost.predict_s(n, 0, 0)
        alone_s = cost.predict_s(budget, 0, 0) * (size - n) / budget
        return size - n if beside_s < alone_s else budget

    def _timed_budget(self, decode_rows: Int32Array, cost: StepCost, target_ms: float) -> int:
        """What a limit on the step's time leaves.

        The limit is the step-time target, or where that is more some times what decoding alone
        would take, and up to four times as much while a long queue waits: streams that go on
        smoothly are no use to those that have not begun. Nor do they gain much: where arithmetic
        bounds a step, a decode token costs 45 us (8B, H200), with others alone 27.
        """
        n = len(decode_rows)
        keys = int(self._table.computed[decode_rows].sum())
        limit_s = max(target_ms / 1000, MOST_STRETCH * cost.predict_s(n, keys, 0))
        queue_s = cost.predict_s(sum(req.to_compute for req in self.waiting), 0, 0)
        limit_s *= min(max(queue_s / LONG_QUEUE_S, 1.0), MOST_PATIENCE)
        if self.prefilling:
            start = int(self._table.computed[self.prefilling[0].row])
        else:  # none, or what is cached of the first that may be admitted
            start = len(self.waiting[0].tokens) - self.waiting[0].to_compute

        def step_s(tokens: int) -> float:
            chunk = tokens - n
            return cost.predict_s(tokens, keys, chunk * (start + chunk // 2))

        least = bisect_left(self._sizes, n + MIN_CHUNK_TOKENS)
        chosen = max(bisect_right(self._sizes, limit_s, lo=least, key=step_s) - 1, least)
        return self._sizes[chosen] - n

    # --- the batch ------------------------------------------------------------------------------

    def _build(self, step_id: int, decode_rows: Int32Array, chunks: dict[int, int]) -> Batch:
        """Return the batch of these rows: decode rows with one token each, and the chunks."""
        table = self._table
        num_decode = len(decode_rows)
        rows = np.concatenate([decode_rows, np.array([*chunks], dtype=np.int32)])
        start = table.computed[rows]
        lengths = np.ones(len(rows), dtype=np.int32)
        lengths[num_decode:] = [*chunks.values()]
        ends = start + lengths
        chunk_ids = [
            table.tokens[row, table.computed[row] : table.computed[row] + length]
            for row, length in chunks.items()
        ]
        samples = ends >= table.prefill_end[rows]
        return Batch(
            step_id=step_id,
            num_decode=num_decode,
            rows=rows,
            start=start,
            lengths=lengths,
            samples=samples,
            chunk_ids=np.concatenate([rows[:0], *chunk_ids]),
            page_updates=table.pages.take_updates(rows),
            sampling=table.sampling(rows),
            logit_edits=edited_reqs(table, rows, ends, samples),
            logprobs=logprobs_request(table, rows, start, ends, samples),
        )

    def launched(self, batch: Batch) -> None:
        """Advance the lengths of a launched batch, and move on the reqs that got further."""
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
        at_limit = table.computed[rows] >= table.limit[rows] - 1
        self.decode_rows = rows[~at_limit]  # of the others the last token is being sampled
