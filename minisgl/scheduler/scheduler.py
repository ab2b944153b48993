"""`Scheduler`: the loop around the engine of one tensor-parallel rank. It handles no text."""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from minisgl.core import (
    FREE_STEPS,
    FinishReason,
    InvalidRequest,
    RequestError,
    SchedulerConfig,
    StepCost,
)
from minisgl.core.batch import Batch, EngineLike
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.message.messages import (
    AbortReq,
    AddReq,
    CopiesEnded,
    EndSession,
    FlushCache,
    Prepared,
    SchedulerStats,
    SetStepCost,
    Shutdown,
    StepOutput,
    ToScheduler,
)
from minisgl.message.stats import ConstraintTotals, KVEventTotals
from minisgl.scheduler.apply import apply, end_copies, end_loading, enqueue, raise_delayed, resume
from minisgl.scheduler.cost_fit import CostFit
from minisgl.scheduler.inbox import Inbox
from minisgl.scheduler.plan import plan
from minisgl.scheduler.preparation import WAIT_S, PreparationQueue
from minisgl.scheduler.request import Req, accept_requests
from minisgl.scheduler.request_table import RequestTable
from minisgl.scheduler.results import Results
from minisgl.scheduler.stats import InFlight, StepMeter
from minisgl.scheduler.view import View

MAX_OVERTAKES = 64  # admissions that overtake an older request before that request comes first
OPENING_WAIT_S = 0.1  # one wait of an idle scheduler while its host memory is being locked
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

    drain_in_flight  reads the results of launched steps, and sends their output (Results.drain).

    I1  The scheduler answers every AddReq with exactly one Finished, also for a request that it
        refuses, aborts or fails.
    I2  A step is resolved when the scheduler has read its result. A request keeps its row and pages
        until the last step that contains it is resolved. There is one exception: the result of a
        step can end a request, by an EOS or stop token or by non-finite logits. The scheduler then
        releases row and pages at once, although the step in flight may still contain the request.
        A fence delays the reuse of the pages until that step is resolved (FencedPool I1).
    I3  The plan depends only on the sequence of messages and of sampled tokens. Rank 0 announces
        by messages the end of work in other threads (Prepared, CopiesEnded) and the step cost that
        it measures (SetStepCost).
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
        cost: StepCost = FREE_STEPS,
        fits: Sequence[CostFit] = (),
    ) -> None:
        """vocab_size: width of the logits. send: takes the output of an iteration and must not
        block. clock: returns seconds. extensions: the engine's extensions. cost: predicts step
        times. fits: one or none; fits the cost to measured times, and replaces `cost`."""
        self._engine = engine
        self._config = config
        self._vocab_size = vocab_size
        self._inbox = inbox
        self._extensions = extensions
        self.table = RequestTable(engine, extensions, eos_token_ids)
        reporters = extensions.cache_reporters
        self._reporters = [new(engine.page_size, engine.num_pages) for new in reporters]
        self.view = View(engine, config, extensions, self.table, self._reporters, cost)
        self.memory = self.view.memory
        self._capacity_tokens = min(engine.max_seq_len, engine.num_pages * engine.page_size)
        self._arrivals = 0
        self._fits = fits
        self._meter = StepMeter(clock, fits)
        self._preparations = PreparationQueue()
        self._plan_hash: int | None = None
        self.totals = SchedulerStats(
            phases=self._meter.phases,
            total_pages=engine.num_pages,
            constraints=extensions.constraint_totals or ConstraintTotals(),
            images=self.view.images.totals,
            kv_events=next((r.totals for r in self._reporters), KVEventTotals()),
        )
        self._results = Results(self.view, self._preparations, self._meter, self.totals, send)
        self._reqs, self._in_flight = self._results.reqs, self._results.in_flight
        self.drain_in_flight = self._results.drain
        self.stopping = False
        self._launched = False  # the last iteration has launched a step

    @property
    def idle(self) -> bool:
        """True when no request is open and no step is in flight."""
        return not self._reqs and not self._in_flight

    @property
    def waits_for_message(self) -> bool:
        """True when only a message can give the scheduler work.

        While a store runs, an idle scheduler still looks for its end. A request that arrives later
        then finds the stored pages ready for eviction, and no page without a copy gives way. For
        the same reason it looks for further blocks, into which a store can begin.
        """
        tier = self.memory.tier
        return self.idle and not self.memory.jobs and not (tier is not None and tier.is_opening)

    def iterate(self) -> None:
        """Run one iteration. If no step is due yet, first wait for a message."""
        clock = self._meter.clock
        own: list[ToScheduler] = [
            SetStepCost(cost=cost) for fit in self._fits if (cost := fit.news(clock()))
        ]
        if self._preparations.preparing or self.memory.tier is not None:
            own += self._prepared()
        messages = self._inbox.receive(self.message_wait_s, self._plan_hash, own)
        if messages:
            self._preparations.new_iteration()
        for message in messages:
            self._handle(message)
        view = self.view
        if view.loading:
            end_loading(view)
        for kind in view.memory.kinds:
            kind.advance(view.running_rows())
        if view.carry.overtakes >= MAX_OVERTAKES:
            raise_delayed(view)
        step = plan(view)
        batch = apply(view, step)
        self._launched = batch is not None
        if batch is not None:
            self._launch(batch, step.admit)
        if step.preempt is not None:  # `apply` has stopped it; it still owns its row and pages
            self._results.end_when_resolved(step.preempt)
        self.drain_in_flight(keep=int(self._config.overlap and batch is not None))
        if self.memory.tier is not None:
            self.memory.tier.store()
        for reporter in self._reporters:
            reporter.flush()

    def stats(self) -> SchedulerStats:
        """Gauges and totals as of now."""
        used, evictable, free = self.memory.usage()
        view, tier = self.view, self.memory.tier
        outside = len(self._preparations.preparing) + len(view.loading) - len(view.paused)
        waiting = len(view.waiting) + outside
        return msgspec.structs.replace(
            self.totals,
            step_id=self.table.steps.resolved,
            busy=not self.idle,
            preparing=self._only_preparing,
            waiting_reqs=waiting,
            running_reqs=len(self._reqs) - waiting,
            free_pages=free,
            evictable_pages=evictable,
            locked_pages=used,
            evicted_pages_total=self.memory.evicted_pages_total,
            ended_pages_total=self.memory.ended_pages_total,
            kind_pages={kind.name: kind.usage() for kind in self.memory.kinds},
            kind_totals={kind.name: kind.totals for kind in self.memory.kinds},
            host_pages={} if tier is None else tier.usage(),
            host_totals={} if tier is None else tier.totals,
            loading_reqs=len(view.loading),
        )

    # --- messages -------------------------------------------------------------------------------

    def message_wait_s(self) -> float | None:
        """Return the seconds for which `iterate` may wait for a message; None: without a limit.

        While all running requests decode, the scheduler plans the next step shortly before the step
        in flight ends. A request that arrives before this plan is then part of the next step. The
        same holds while only requests of later priorities have prompts.
        """
        if self.idle:
            if self.waits_for_message:
                return None
            return WAIT_S if self.memory.jobs else OPENING_WAIT_S
        if self._config.target_step_ms is None:
            return 0.0  # without a target only throughput counts, so the scheduler never waits
        if not self._in_flight or self.view.has_urgent(self.view.prefilling):
            return 0.0
        step = self._in_flight[0]
        if step.pending.done():
            return 0.0
        predicted_s = step.batch.predict_s(self.view.cost)
        remaining_s = self._meter.remaining_s(predicted_s, not self.view.has_prompts)
        # The next step must be launched before the device runs out of work. A launch with token
        # masks returns later, so the scheduler notices the end of the previous step later.
        lead_s = max(MIN_LAUNCH_LEAD_S, 2 * self._meter.decode_launch_s) + step.mask_s
        return max(remaining_s - lead_s, 0.0)

    @property
    def _only_preparing(self) -> bool:
        """No step is due: all open requests, at least one, wait for constraints or for copies."""
        preparing = len(self._preparations.preparing) + len(self.view.loading)
        return 0 < preparing == len(self._reqs) and not self._in_flight

    def _prepared(self) -> list[ToScheduler]:
        """Return messages about the requests that are prepared and the copies that have ended here.

        If nothing runs, wait for one of them, because the end of a copy may let a request run.
        """
        tier, wait = self.memory.tier, self._only_preparing
        stalled = not (self._launched or self._in_flight or self.idle)
        copies = [] if tier is None else tier.copier.done(WAIT_S if wait or stalled else 0.0)
        prepared = self._preparations.prepared(wait and not copies)
        ended: list[ToScheduler] = []
        if tier is not None and (copies or tier.num_open < tier.copier.num_open):
            ended = [CopiesEnded(jobs=copies, num_open=tier.copier.num_open)]
        return [prepared, *ended] if prepared.uids else ended

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case AddReq():
                self._add(message)
            case AbortReq():
                req = self._reqs.get(message.uid)
                if req is not None:  # None: the request has finished or was refused
                    self._results.abort(req, message.reason)
            case Prepared():
                for uid in message.uids:
                    if (req := self._preparations.take(uid)) is not None:  # None: aborted
                        req.slow = uid in message.slow
                        self._start(req, uid in message.failed)
            case CopiesEnded():
                end_copies(self.view, message)
            case SetStepCost():
                self.view.cost = message.cost
            case EndSession():
                self.memory.end_session(message.session)
            case FlushCache():
                self.memory.flush()
            case Shutdown():
                self.stopping = True
                for req in list(self._reqs.values()):
                    self._results.abort(req, FinishReason.ABORT)

    def _add(self, message: AddReq) -> None:
        limits, first = (self._vocab_size, self._capacity_tokens), self._arrivals + 1
        self._arrivals += message.count
        try:
            images = self._engine.images
            reqs = accept_requests(message, *limits, first, self._extensions, images)
        except RequestError as error:
            for uid in range(message.uid, message.uid + message.count):
                self._results.outputs.refuse(uid, message, error)
            return
        for req in reqs:
            if req.uid in self._reqs:
                in_use = InvalidRequest(f"uid {req.uid} is in use; send another uid")
                self._results.outputs.refuse(req.uid, message, in_use)
                continue
            self._reqs[req.uid] = req
            if self._preparations.add(req):
                self._start(req, req.constraint.failure(len(req.tokens)) is not None)

    def _start(self, req: Req, failed: bool) -> None:
        """Enqueue or resume a request that is prepared on rank 0. failed: end it instead."""
        if failed:
            req.end_reason = FinishReason.ERROR
            self._results.end_when_resolved(req, req.constraint.failure(len(req.tokens)))
        elif req in self.view.paused:
            resume(self.view, req)
        else:
            enqueue(self.view, req)

    # --- steps ----------------------------------------------------------------------------------

    def _launch(self, batch: Batch, admitted: Iterable[Req]) -> None:
        totals, began_s = self.totals, self._meter.clock()
        totals.overlapped_steps_total += bool(self._in_flight)
        for req in admitted:
            req.admitted_s = req.admitted_s or began_s
        masked_s = totals.constraints.mask_seconds
        pending = self._engine.launch(batch)
        launch_s = self._meter.clock() - began_s
        mask_s = totals.constraints.mask_seconds - masked_s
        self._in_flight.append(InFlight(batch, pending, began_s, launch_s - mask_s, mask_s))
        if self._config.check_plans:
            self._plan_hash = batch.plan_hash()
        totals.prefill_tokens_total += len(batch.chunk_ids)
