"""`Scheduler`: the loop around the engine of one tensor-parallel rank. It handles no text."""

import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from minisgl.core import (
    Batch,
    EngineError,
    EngineLike,
    FinishReason,
    GrammarFailed,
    InvalidRequest,
    MinisglError,
    PendingStep,
    RequestError,
    SchedulerConfig,
)
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.message.messages import (
    AbortReq,
    AddReq,
    FlushCache,
    Prepared,
    SchedulerStats,
    SetStepCost,
    Shutdown,
    StepOutput,
    ToScheduler,
)
from minisgl.message.stats import ConstraintTotals, KVEventTotals
from minisgl.scheduler.apply import (
    apply,
    before_plan,
    enqueue,
    record_drafts,
    record_launch,
    remove,
)
from minisgl.scheduler.cost_fit import FREE, StepPrices
from minisgl.scheduler.forced import append_forced
from minisgl.scheduler.inbox import Inbox
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.plan import plan
from minisgl.scheduler.preparation import PreparationQueue
from minisgl.scheduler.request import Req, ReqState, accept_request
from minisgl.scheduler.request_table import NewTokens, RequestTable
from minisgl.scheduler.stats import StepMeter
from minisgl.scheduler.view import new_view

MIN_LAUNCH_LEAD_S = 0.002  # plan and launch take 0.3 to 0.8 ms; 5 ms without a CUDA graph


class Scheduler:
    """Runs requests on one engine, each from its AddReq message to its Finished message.

    One iteration, with overlap (the engine computes step n at the same time):

        inbox ----> receive messages            new requests, aborts
                    plan step n + 1             `plan`: which requests, how many tokens
                    apply the plan              rows, pages and the batch
        engine <--- launch step n + 1           does not wait
        engine ---> read the result of step n   tokens, ended requests; free and cache pages
        send <----- StepOutput                  all tokens of the step, in one message

        inbox = LocalInbox()
        scheduler = Scheduler(engine, SchedulerConfig(), vocab_size=32_000, eos_token_ids=(2,),
                              inbox=inbox, send=print)
        inbox.messages.append(AddReq(uid=1, token_ids=ids, sampling=SamplingParams(max_tokens=8)))
        while inbox.messages or not scheduler.idle:
            scheduler.iterate()

    I1  The scheduler answers every AddReq with exactly one Finished, also for a request that it
        refuses, aborts or fails.
    I2  A step is resolved when the scheduler has read its result. A request keeps its row and pages
        until the last step that contains it is resolved. There is one exception: the result of a
        step can end a request, by an EOS or stop token or by non-finite logits. The scheduler then
        releases row and pages at once, although the step in flight may still contain the request.
        A fence delays the reuse of the pages until that step is resolved (FencedPool I1).
    I3  The plan depends only on the sequence of messages and of sampled tokens. Rank 0 announces
        by messages the end of work in other threads (Prepared) and the step cost that it measures
        (SetStepCost).
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
        prices: StepPrices = FREE,
    ) -> None:
        """vocab_size: width of the logits. send: takes the output of an iteration and must not
        block. clock: returns seconds. extensions: the engine's extensions. prices: of steps."""
        self._engine = engine
        self._config = config
        self._vocab_size = vocab_size
        self._inbox = inbox
        self._extensions = extensions
        self._send = send
        self.table = RequestTable(engine, extensions, eos_token_ids)
        report = extensions.cache_reporter
        reporter = report and report(engine.page_size, engine.num_pages)
        self._reporters = [reporter] if reporter else []  # one or none
        self.view = new_view(engine, config, extensions, self.table, reporter, prices.cost())
        self.memory = self.view.memory
        self._capacity_tokens = min(engine.max_seq_len, engine.num_pages * engine.page_size)
        self._arrivals = 0
        self._outputs = OutputBuilder(self.table)
        self._meter = StepMeter(clock, prices)
        self._reqs: dict[int, Req] = {}
        self._preparations = PreparationQueue()
        # Requests to end or preempt once the step in flight that contains them is resolved.
        self._ending: list[Req] = []
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        self._decode_launch_s = 0.0  # host time of the last launch of a decode-only step
        self._mask_s = 0.0  # host time of the token masks of the last launch
        self._plan_hash: int | None = None
        self.totals = SchedulerStats(
            phases=self._meter.phases,
            total_pages=engine.num_pages,
            constraints=extensions.constraint_totals or ConstraintTotals(),
            kv_events=reporter.totals if reporter else KVEventTotals(),
        )
        self.stopping = False

    @property
    def idle(self) -> bool:
        """True when no request is open and no step is in flight."""
        return not self._reqs and not self._in_flight

    def iterate(self) -> None:
        """Run one iteration. If idle, or if no step is due yet, first wait for a message."""
        for message in self._inbox.receive(self.message_wait_s(), self._plan_hash, self._own()):
            self._handle(message)
        before_plan(self.view)
        step = plan(self.view)
        batch = apply(self.view, step)
        if batch is not None:
            self._launch(batch)
        if step.preempt is not None:
            self._end_when_resolved(step.preempt)
        self.drain_in_flight(keep=int(self._config.overlap and batch is not None))
        for reporter in self._reporters:
            reporter.flush()

    def drain_in_flight(self, keep: int = 0) -> None:
        """Read the results of launched steps, except for the last `keep`, and send the output."""
        while len(self._in_flight) > keep:
            self._resolve(*self._in_flight.popleft())
        if (output := self._outputs.take(self.view.resolved_step)) is not None:
            self._send(output)

    def stats(self) -> SchedulerStats:
        """Gauges and totals as of now."""
        used, evictable, free = self.memory.usage()
        waiting = len(self.view.waiting) + len(self._preparations)
        return msgspec.structs.replace(
            self.totals,
            step_id=self.view.resolved_step,
            busy=not self.idle,
            preparing=self._only_preparing,
            waiting_reqs=waiting,
            running_reqs=len(self._reqs) - waiting,
            free_pages=free,
            evictable_pages=evictable,
            locked_pages=used,
            evicted_pages_total=self.memory.evicted_pages_total,
            kind_pages={kind.name: kind.usage() for kind in self.memory.kinds},
        )

    # --- messages -------------------------------------------------------------------------------

    def message_wait_s(self) -> float | None:
        """Return the seconds for which `iterate` may wait for a message; None: without a limit.

        While all running requests decode, the scheduler plans the next step shortly before the step
        in flight ends. A request that arrives before this plan is then part of the next step. The
        same holds while only requests of later priorities have prompts.
        """
        if self.idle:
            return None
        if self._config.target_step_ms is None:
            return 0.0  # without a target only throughput counts, so the scheduler never waits
        if not self._in_flight or self.view.has_urgent(self.view.prefilling):
            return 0.0
        batch, pending = self._in_flight[0]
        if pending.done():
            return 0.0
        predicted_s = self.view.predict_s(batch)
        remaining_s = self._meter.remaining_s(predicted_s, not self.view.has_prompts)
        # The next step must be launched before the device runs out of work. A launch with token
        # masks returns later, so the scheduler notices the end of the previous step later.
        lead_s = max(MIN_LAUNCH_LEAD_S, 2 * self._decode_launch_s) + self._mask_s
        return max(remaining_s - lead_s, 0.0)

    @property
    def _only_preparing(self) -> bool:
        """No step is due: all open requests, at least one, wait for their constraints."""
        return 0 < len(self._preparations) == len(self._reqs) and not self._in_flight

    def _own(self) -> list[ToScheduler]:
        """Return the messages of this rank about itself: prepared constraints, a new step cost."""
        own: list[ToScheduler] = []
        if self._preparations:
            prepared = self._preparations.prepared(wait=self._only_preparing)
            own += [prepared] if prepared.uids else []
        if cost := self._meter.prices.news(self._meter.clock()):
            own.append(SetStepCost(cost=cost))
        return own

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case AddReq():
                for index in range(message.count):
                    self._add(message, index)
            case AbortReq():
                req = self._reqs.get(message.uid)
                if req is not None:  # None: the request has finished or was refused
                    self._abort(req, message.reason)
            case Prepared():
                for uid in message.uids:
                    self._start(uid, uid in message.failed)
            case SetStepCost():
                self.view.cost = message.cost
            case FlushCache():
                self.memory.flush()
            case Shutdown():
                self.stopping = True
                for req in list(self._reqs.values()):
                    self._abort(req, FinishReason.ABORT)

    def _add(self, message: AddReq, index: int) -> None:
        self._arrivals += 1
        uid = message.uid + index
        try:
            if uid in self._reqs:
                raise InvalidRequest(f"uid {uid} is in use; send another uid")
            limits = self._vocab_size, self._capacity_tokens
            req = accept_request(message, index, *limits, self._arrivals, self._extensions)
        except RequestError as error:
            self._outputs.refuse(uid, message, error)
            return
        self._reqs[req.uid] = req
        if req.constraint is None:
            enqueue(self.view, req)
        else:
            self._preparations.add(req)

    def _start(self, uid: int, failed: bool) -> None:
        """Enqueue a request that is prepared on rank 0. failed: end it, as it failed on rank 0."""
        req = self._preparations.take(uid)
        if req is None:  # it was aborted
            return
        if failed and req.constraint is not None:
            req.end_reason = FinishReason.ERROR
            self._finish(req, req.constraint.failure(len(req.tokens)))
        else:
            enqueue(self.view, req)

    def _abort(self, req: Req, reason: FinishReason) -> None:
        req.end_reason = reason
        if req.state is ReqState.PREPARING:
            self._preparations.withdraw(req)
            self._finish(req)
        elif req.state is ReqState.WAITING:
            self.view.waiting.remove(req)
            self._finish(req)
        else:
            self._end_when_resolved(req)

    # --- ending and preemption ------------------------------------------------------------------

    def _end_when_resolved(self, req: Req) -> None:
        """End or preempt `req`: now, or once the step in flight that contains it has a result."""
        remove(self.view, req)
        if int(self.table.last_step[req.row]) <= self.view.resolved_step:
            self._release(req)
        elif req not in self._ending:
            self._ending.append(req)

    def _release(self, req: Req, error: MinisglError | None = None) -> None:
        """Take the row and the pages from `req`.

        A preempted request then waits again; any other request has finished. error: set if the
        request failed.
        """
        table, row = self.table, req.row
        # The prompt is cached only if the first output token is known. Only then is it known that
        # the logits are finite. Tokens that no resolved step has forwarded are not cached either:
        # the tokens of a decode step in flight, and forced tokens. The newest known token is one of
        # them, because the next decode step forwards it first.
        cacheable = error is None and table.known[row] > table.prefill_end[row]
        forwarded = int(table.computed[row]) - int(table.last_step[row] > self.view.resolved_step)
        forwarded = min(forwarded, int(table.known[row]) - 1)
        self.memory.release(req.row, req.cache_salt, forwarded if cacheable else 0)
        self.table.close_row(req)
        if req.end_reason is not None:
            self._finish(req, error)
        elif req.constraint is not None and req.failed_at == len(req.tokens):
            self._preparations.again(req)
        else:
            self.totals.preemptions_total += 1
            enqueue(self.view, req)

    def _finish(self, req: Req, error: MinisglError | None = None) -> None:
        if isinstance(error, GrammarFailed):
            failures, code = self.totals.constraints.failures, error.code or ""
            failures[code] = failures.get(code, 0) + 1
        req.state = ReqState.FINISHED
        del self._reqs[req.uid]
        self._outputs.finish(req, error)

    # --- steps ----------------------------------------------------------------------------------

    def _launch(self, batch: Batch) -> None:
        self.totals.overlapped_steps_total += bool(self._in_flight)
        now_s = self._meter.clock()
        for req in self.view.prefilling:
            req.admitted_s = req.admitted_s or now_s
        before_s = self.totals.constraints.mask_seconds
        self._in_flight.append((batch, self._engine.launch(batch)))
        self._meter.record_launch(now_s, self._in_flight[-1][1].done())
        self._mask_s = self.totals.constraints.mask_seconds - before_s
        # With edited logits a launch may wait for the previous step, so its time is not recorded.
        if not batch.num_prefill_tokens and batch.logit_edits is None:
            self._decode_launch_s = self._meter.clock() - now_s
        record_launch(self.view, batch)
        if self._config.check_plans:
            self._plan_hash = batch.plan_hash()
        self.totals.prefill_tokens_total += batch.num_prefill_tokens

    def _resolve(self, batch: Batch, pending: PendingStep) -> None:
        """Wait for a launched step and act on its result."""
        result = pending.wait()
        self._meter.record_result(batch, result.by_graph)
        self.view.resolved_step = batch.step_id
        self.table.rows.resolve(batch.step_id)
        self.memory.resolve(batch.step_id)
        chunks = slice(batch.num_decode, None)
        completed_rows = batch.rows[chunks][batch.samples[chunks]].tolist()
        prefilled = [req for row in completed_rows if (req := self.table.reqs[row]) is not None]
        new = self.table.read_result(batch, result)
        for req in prefilled:
            if not req.prefill_done and new.ended.get(req.row) is not FinishReason.ERROR:
                self.totals.prompt_tokens_total += req.prompt_len
                self.totals.cached_tokens_total += req.cached_tokens
                self._outputs.open(req)
        if batch.drafting:
            self._outputs.predicted(batch, result, new.rows)
        self._outputs.logprobs(batch, result, new.rows)
        self._take_tokens(new)
        if batch.drafting:
            record_drafts(self.view, batch, result, self.totals.drafts)
        # A prompt with non-finite logits has ended above. The logits of the prompts that are left
        # are finite, so other requests may now use their KV.
        for req in prefilled:
            if req in self.view.uncached:  # False: the chunk held forced tokens, or `req` ends
                del self.view.uncached[req]
                computed = int(self.table.prefill_end[req.row])
                self.memory.publish(req.row, req.cache_salt, computed)
        ending, self._ending = self._ending, []
        for req in ending:
            if req.state is not ReqState.FINISHED:  # a token of this step may have ended it
                self._end_when_resolved(req)
        if batch.logit_edits is not None:
            new = append_forced(new.rows, self.view)
            self.totals.constraints.forced_tokens += len(new.rows)
            self._take_tokens(new)

    def _take_tokens(self, new: NewTokens) -> None:
        """Send new tokens, and end the requests of the rows that have ended."""
        self.totals.output_tokens_total += len(new.rows)
        self._outputs.tokens(new)
        for row, reason in new.ended.items():
            req, known = self.table.req_at(row), int(self.table.known[row])
            constraint = req.constraint if reason is FinishReason.ERROR else None
            if constraint is not None and req.failed_at != known:
                # The mask of this position was not ready, or allows no token. The request is
                # preempted, and its constraint prepares the mask.
                req.failed_at = known
                self.table.drop_in_flight(np.array([row], dtype=np.int32))
                self._end_when_resolved(req)
                continue
            req.end_reason = reason
            error: MinisglError | None = None if constraint is None else constraint.failure(known)
            if reason is FinishReason.ERROR and error is None:
                self.totals.nonfinite_rows_total += 1
                error = EngineError("the model produced non-finite logits")
            remove(self.view, req)
            # A step in flight may still contain the request: the pages are fenced (I2).
            self._release(req, error)
