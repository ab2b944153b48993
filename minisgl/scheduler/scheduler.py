"""The scheduler of one tensor-parallel rank: the loop around one engine.

One iteration: take messages; plan and launch step n+1; then, while it runs, read the result of
step n, end who is done and send what came out. It knows token ids only.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from minisgl.core import (
    Batch,
    EngineLike,
    FinishReason,
    Int32Array,
    InvalidRequest,
    InvariantBroken,
    PendingStep,
    RequestError,
    SchedulerConfig,
)
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.message import (
    AbortReq,
    AddReq,
    FlushCache,
    SchedulerStats,
    Shutdown,
    StepOutput,
    ToScheduler,
)
from minisgl.scheduler.inbox import Inbox
from minisgl.scheduler.intake import accept
from minisgl.scheduler.kv_manager import KVMemory
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.policy import Planner
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.request_table import RequestTable
from minisgl.scheduler.results import read_result
from minisgl.scheduler.stats import StepMeter

LAUNCH_LEAD_S = 0.002  # at least: planning and launching take 0.3 to 0.8 ms, 5 without a graph


class Scheduler:
    """Owns all reqs from admission to their one terminal message.

    I1  Every AddReq is answered by exactly one Finished, whatever happens.
    I2  A req leaves (finish, abort, preemption) when the last step that contains it has been
        resolved, or, if it ended by its own token, when that token's step has; what the step in
        flight still touches is fenced (FencedPool I1).
    I3  The plan depends only on the sequence of messages and of sampled tokens.
    """

    def __init__(
        self,
        engine: EngineLike,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        inbox: Inbox,
        send: Callable[[StepOutput], object],
        clock: Callable[[], float] = time.monotonic,
        extensions: Extensions = DEFAULT_EXTENSIONS,
    ) -> None:
        """send: takes what came out of an iteration, and never blocks. extensions: the engine's."""
        self._engine = engine
        self._config = config
        self._plan_hash: int | None = None
        self._inbox = inbox
        self._extensions = extensions
        self._send = send
        self._eos: Int32Array = np.array(eos_token_ids, dtype=np.int32)
        max_pages = -(-engine.max_seq_len // engine.page_size)
        self.table = RequestTable(
            engine.max_running_reqs, engine.max_seq_len, max_pages, extensions.sampling_columns
        )
        publishes = config.cache_type != "naive"
        self.memory = KVMemory(engine.page_size, engine.num_pages, publishes)
        self.planner = Planner(config, self.memory, self.table)
        most_tokens = min(engine.max_seq_len, engine.num_pages * engine.page_size)
        self._accept = partial(accept, vocab_size=vocab_size, most_tokens=most_tokens)
        self._serial = 0
        self._outputs = OutputBuilder()
        self._meter = StepMeter(clock)
        self._reqs: dict[int, Req] = {}
        self._leaving: list[Req] = []
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        self._launched_step = 0
        self._launch_s = 0.0  # of the last step in which all decode
        self._resolved_step = 0
        self.totals = SchedulerStats()
        self.stopping = False

    @property
    def idle(self) -> bool:
        """Nothing to do until a message comes."""
        return not self._reqs and not self._in_flight

    def iterate(self) -> None:
        """One iteration of the loop. Waits for a message when idle, or when it is early."""
        for message in self._inbox.receive(self._spare_s(), self._plan_hash):
            self._apply(message)
        launched = self._launch_next()
        self.drain_in_flight(keep=1 if self._config.overlap and launched else 0)

    def _spare_s(self) -> float | None:
        """How long a message may be waited for; None when idle. While all others decode, the next
        step is planned shortly before the one in flight ends: who comes meanwhile is in it."""
        if self.idle:
            return None
        busy = self.planner.prefilling or self.planner.waiting or not self._in_flight
        if busy or self._config.target_step_ms is None:  # nobody looks at single tokens
            return 0.0
        batch, pending = self._in_flight[0]
        left_s = 0.0 if pending.done() else self._meter.left_s(self.planner.decode_s(batch))
        return max(left_s - max(LAUNCH_LEAD_S, 2 * self._launch_s), 0.0)  # the device never waits

    def drain_in_flight(self, keep: int = 0) -> None:
        """Read the results of launched steps, but for the last `keep`, and send what came out."""
        while len(self._in_flight) > keep:
            self._resolve(*self._in_flight.popleft())
        output = self._outputs.take(self._resolved_step)
        if output is not None:
            self._send(output)

    def stats(self) -> SchedulerStats:
        """Gauges and totals as of now."""
        pool, cache = self.memory.pool, self.memory.cache
        free_pages = pool.num_free + pool.num_quarantined
        return msgspec.structs.replace(
            self.totals,
            step_id=self._resolved_step,
            busy=not self.idle,
            waiting_reqs=len(self.planner.waiting),
            running_reqs=len(self._reqs) - len(self.planner.waiting),
            free_pages=free_pages,
            evictable_pages=cache.evictable_pages,
            locked_pages=pool.size - free_pages - cache.evictable_pages,
            total_pages=pool.size,
            evicted_pages_total=self.memory.evicted_pages_total,
            phases=self._meter.stats(),
        )

    def check_integrity(self) -> None:
        """Raise InvariantBroken when a page, a row or a req is lost or owned twice."""
        self.memory.check_integrity(self.table)
        if self.idle and self.memory.cache.locked_pages:
            raise InvariantBroken("idle, but pages are locked; this is a bug")

    def _apply(self, message: ToScheduler) -> None:
        match message:
            case AddReq():
                self._add(message)
            case AbortReq():
                req = self._reqs.get(message.uid)
                if req is not None:  # else it has finished, or was refused
                    self._abort(req, message.reason)
            case FlushCache():
                self.memory.flush()
            case Shutdown():
                self.stopping = True
                for req in list(self._reqs.values()):
                    self._abort(req, FinishReason.ABORT)

    def _add(self, message: AddReq) -> None:
        self._serial += 1
        try:
            if message.uid in self._reqs:
                raise InvalidRequest(f"uid {message.uid} is in use")
            req = self._accept(message, serial=self._serial)
            req.logit_states = self._extensions.open_states(req.sampling)
        except RequestError as error:
            self._outputs.refuse(message, error)
            return
        self._reqs[req.uid] = req
        self.planner.enqueue(req)

    def _abort(self, req: Req, reason: FinishReason) -> None:
        req.ending = reason
        if req.state is ReqState.WAITING:
            self.planner.waiting.remove(req)
            self._finish(req, reason)
        else:
            self._leave(req)

    def _leave(self, req: Req) -> None:
        """Act now if no step in flight contains `req`, else when that step is resolved (I2)."""
        self.planner.leave(req)
        if int(self.table.last_step[req.row]) <= self._resolved_step:
            self._carry_out(req)
        elif req not in self._leaving:
            self._leaving.append(req)

    def _carry_out(self, req: Req) -> None:
        known = int(self.table.known[req.row])
        # Until a prompt has given its first token nobody has seen finite logits of it, so none of
        # it is cached. After that all but the last token: its KV may not be written yet.
        seen_finite = known > int(self.table.prefill_end[req.row])
        self.memory.release(req, self.table, known - 1 if seen_finite else 0)
        if req.ending is None:
            self.totals.preemptions_total += 1
            self.planner.enqueue(req)
        else:
            self._finish(req, req.ending)

    def _launch_next(self) -> bool:
        plan = self.planner.plan(self._launched_step + 1, in_flight=bool(self._in_flight))
        if plan.batch is not None:
            self.totals.overlapped_steps_total += bool(self._in_flight)
            now_s = self._meter.clock()
            for req in self.planner.prefilling:
                req.admitted_s = req.admitted_s or now_s
            self._meter.launched()
            pending = self._engine.launch(plan.batch)
            self._in_flight.append((plan.batch, pending))
            if not plan.batch.num_prefill_tokens:
                self._launch_s = self._meter.clock() - now_s
            self._launched_step = plan.batch.step_id
            self.planner.launched(plan.batch)
            if self._config.check_plans:
                self._plan_hash = plan.batch.plan_hash()
            self.totals.prefill_tokens_total += plan.batch.num_prefill_tokens
        elif plan.victim is None and not self._in_flight and self.planner.waiting:
            raise InvariantBroken("nothing runs, yet nobody can be admitted; this is a bug")
        if plan.victim is not None:
            self._leave(plan.victim)
        return plan.batch is not None

    def _resolve(self, batch: Batch, pending: PendingStep) -> None:
        result = pending.wait()
        self._meter.resolved(batch, result.by_graph)
        self._resolved_step = batch.step_id
        self.memory.pool.resolve(batch.step_id)
        self.table.rows.resolve(batch.step_id)
        n = batch.num_decode
        last = batch.rows[n:][batch.samples[n:]].tolist()  # whose prompts this step completed
        prompted = [req for row in last if (req := self.table.reqs[row]) is not None]
        outcome = read_result(batch, result, self.table, self._eos)
        self.totals.output_tokens_total += len(outcome.rows)
        for req in prompted:
            if not req.opened and outcome.ended.get(req.row) is not FinishReason.ERROR:
                self.totals.prompt_tokens_total += req.prompt_len
                self.totals.cached_tokens_total += req.cached_tokens
                self._outputs.open(req)
        self._outputs.tokens(self.table.uid[outcome.rows], outcome.tokens)
        self._outputs.logprobs(batch, result, self.table, outcome.rows)
        for row, reason in outcome.ended.items():
            self._end_row(row, reason)
        for req in prompted:  # only now, with finite logits seen, may others use the prompt's KV
            self.planner.unpublished.pop(req, None)
            if req.state is ReqState.DECODE:
                self.memory.publish(req, self.table, int(self.table.prefill_end[req.row]))
        leaving, self._leaving = self._leaving, []
        for req in leaving:
            if req.state is not ReqState.FINISHED:  # by its own token
                self._leave(req)

    def _end_row(self, row: int, reason: FinishReason) -> None:
        """The step's own result ends the req; a step in flight may still contain it (fences)."""
        req = self.table.req_at(row)
        self.planner.leave(req)
        broken = reason is FinishReason.ERROR
        self.totals.nonfinite_rows_total += broken
        self.memory.release(req, self.table, 0 if broken else int(self.table.known[row]) - 1)
        self._finish(req, reason, "the model produced non-finite logits" if broken else None)

    def _finish(self, req: Req, reason: FinishReason, error: str | None = None) -> None:
        req.state = ReqState.FINISHED
        del self._reqs[req.uid]
        self._outputs.finish(req, reason, error)
