"""`Fleet`: replicas behind a router in virtual time, with failures, rollouts and autoscaling.

A queue of events (a heap) advances the time: arrivals, iterations of the schedulers, and changes of
the replicas. A replica without requests has no event, so idle replicas cost nothing.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from minisgl.benchmark.client import Answer
from minisgl.benchmark.fleet.autoscale import SYNC_S, Autoscaler
from minisgl.benchmark.fleet.replica import Replica, ReplicaState
from minisgl.benchmark.fleet.routers import RequestRouter
from minisgl.benchmark.outbox import record_step
from minisgl.benchmark.trace import Load, Turns
from minisgl.benchmark.virtual_engine import EngineSettings
from minisgl.core import InvariantBroken, SamplingParams
from minisgl.message.messages import AddReq, StepOutput

RETRY_S = 1.0  # a client sends a failed request again after this time


class FleetPlan(NamedTuple):
    """The replicas, and their failures, rollouts and autoscaling.

    replicas     ready replicas at time 0.
    front_end_s  time of a request from the router to the scheduler: HTTP and the tokenizer.
    start_s      time from the start of a replica until it is ready.
    drain_s      after this time a draining replica ends its running requests.
    settle_s     a rollout replaces the next replica this long after a new one is ready.
    failures_s   times at which the ready replica with the lowest number dies; it starts again.
    rollouts_s   times at which a rolling restart begins.
    retries      number of times that a client sends a lost request again.
    autoscaler   the rules of the autoscaler; None: the number of replicas is fixed.
    """

    replicas: int
    front_end_s: float
    start_s: float
    drain_s: float
    settle_s: float
    failures_s: tuple[float, ...] = ()
    rollouts_s: tuple[float, ...] = ()
    retries: int = 0
    autoscaler: Autoscaler | None = None


class ReplicaCount(NamedTuple):
    """From at_s on, `ready` replicas take requests and `total` replicas hold GPUs."""

    at_s: float
    ready: int
    total: int


@dataclass
class FleetResult:
    """answers: of all requests, in order. resent: requests sent again. counts: in order of time."""

    answers: list[Answer]
    resent: int = 0
    counts: list[ReplicaCount] = field(default_factory=list)
    seconds: float = 0.0


class Fleet:
    """Runs one load.

    I1  Each request of the load ends exactly once: with all its tokens, or with an error.
    I2  Time never decreases. An output becomes visible at the end of its step.
    """

    def __init__(
        self, load: Load, arrivals_s: list[float], settings: EngineSettings, plan: FleetPlan
    ) -> None:
        """arrivals_s: rising times at which clients send the requests of `load`.

        A client sends a request with a turn after the requests for which it waits have ended, or
        after it has given them up.
        """
        self._load = load
        self._turns = Turns(load, arrivals_s)
        self._settings = settings
        self._plan = plan
        # Entries are (time, is_step, number, action): at one time, arrivals come before steps.
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._replicas: list[Replica] = []
        self._num_replicas = 0
        self._desired = plan.replicas
        self._retries_left = [plan.retries] * len(load.prompts)
        self._unanswered = len(load.prompts)
        self._on_end: dict[int, Callable[[], None]] = {}  # by replica: called after its drain

    def run(self, router: RequestRouter) -> FleetResult:
        self._router = router
        self._result = FleetResult([Answer(0.0, prompt_tokens=len(p)) for p in self._load.prompts])
        for _ in range(self._plan.replicas):
            self._ready(self._add())
        self._arrive_at(self._turns.first)
        for at_s in self._plan.failures_s:
            self._at(at_s, self._fail)
        for at_s in self._plan.rollouts_s:
            self._at(at_s, lambda: self._roll(self._replicas.copy()))
        if self._plan.autoscaler is not None:
            self._at(SYNC_S, self._autoscale)
        while self._unanswered:
            if not self._events:
                raise InvariantBroken(f"{self._unanswered} requests have no event; this is a bug")
            self._now_s, *_, action = heapq.heappop(self._events)
            action()
        self._result.seconds = self._now_s
        return self._result

    def _at(self, at_s: float, action: Callable[[], None], is_step: bool = False) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, is_step, self._num_events, action))

    # --- requests -------------------------------------------------------------------------------

    def _arrive_at(self, due: list[tuple[float, int]]) -> None:
        for due_s, uid in due:
            self._at(due_s, partial(self._arrive, uid))

    def _arrive(self, uid: int) -> None:
        self._result.answers[uid].sent_s = self._now_s
        self._send(uid)

    def _ended(self, uid: int) -> None:
        self._unanswered -= 1
        self._arrive_at(self._turns.ended(uid, self._now_s))

    def _send(self, uid: int) -> None:
        ready = [r for r in self._replicas if r.state is ReplicaState.READY]
        if not ready:
            self._lose(uid, "no replica is ready")
            return
        prompt = self._load.prompts[uid]
        replica = self._router.choose(prompt, ready, self._now_s)
        replica.open_reqs[uid] = None
        sampling = SamplingParams(max_tokens=self._load.max_tokens[uid], ignore_eos=True, seed=0)
        ids = prompt.astype("<i4").tobytes()
        prefixes = (self._load.stable[uid] if self._load.stable else 0, 0)
        message = AddReq(uid=uid, token_ids=ids, sampling=sampling, call=uid, prefixes=prefixes)
        replica.deliver(self._now_s + self._plan.front_end_s, message)
        self._schedule(replica)

    def _lose(self, uid: int, error: str) -> None:
        """Record a failed request. Its client sends it again, or gives up."""
        answer = self._result.answers[uid]
        answer.outputs_s.clear()
        answer.output_tokens = answer.cached_tokens = 0
        if self._retries_left[uid]:
            self._retries_left[uid] -= 1
            self._result.resent += 1
            self._at(self._now_s + RETRY_S, lambda: self._send(uid))
        else:
            answer.error = error
            self._ended(uid)

    def _schedule(self, replica: Replica) -> None:
        """Put the replica's next time into the queue, unless the queue has it."""
        wake_s = replica.next_s()
        if wake_s < math.inf and wake_s != replica.wake_s:
            replica.wake_s = wake_s
            self._at(wake_s, lambda: self._wake(replica, wake_s), is_step=True)

    def _wake(self, replica: Replica, wake_s: float) -> None:
        """End or begin an iteration of a replica."""
        if replica.wake_s != wake_s or replica.state is ReplicaState.GONE:
            return  # an earlier event has replaced this one
        replica.wake_s = math.inf
        if not replica.iterating:
            replica.iterate(self._now_s)
        else:
            outputs, events = replica.finish()
            for output in outputs:
                self._record(replica, output)
            self._router.cache_events(replica.number, events)
            if replica.state is ReplicaState.DRAINING and not replica.open_reqs:
                self._end(replica)
                return
        self._schedule(replica)

    def _record(self, replica: Replica, output: StepOutput) -> None:
        record_step(self._result.answers, output, self._now_s)
        for finished in output.finished:
            del replica.open_reqs[finished.uid]
            self._ended(finished.uid)

    # --- replicas -------------------------------------------------------------------------------

    def _add(self) -> Replica:
        replica = Replica(self._num_replicas, self._settings, self._router.reads_cache)
        replica.engine.now_s = self._now_s
        self._num_replicas += 1
        self._replicas.append(replica)
        return replica

    def _start(self, then: Callable[[], None] | None = None) -> None:
        """Start a replica. `then` runs when it is ready and has settled."""
        replica = self._add()
        self._at(self._now_s + self._plan.start_s, lambda: self._ready(replica))
        if then is not None:
            self._at(self._now_s + self._plan.start_s + self._plan.settle_s, then)
        self._count()

    def _ready(self, replica: Replica) -> None:
        if replica.state is ReplicaState.STARTING:
            replica.state = ReplicaState.READY
            self._count()

    def _end(self, replica: Replica) -> None:
        """Remove a replica. It loses its open requests."""
        replica.state = ReplicaState.GONE
        self._replicas.remove(replica)
        self._router.forget(replica.number)
        for uid in replica.open_reqs:
            self._lose(uid, "the replica ended before the answer was complete")
        self._count()
        self._on_end.pop(replica.number, lambda: None)()

    def _drain(self, replica: Replica, then: Callable[[], None] = lambda: None) -> None:
        """Send no more requests to a replica, and remove it when its requests have ended."""
        self._on_end[replica.number] = then
        if replica.open_reqs:
            replica.state = ReplicaState.DRAINING
            self._count()
            self._at(self._now_s + self._plan.drain_s, lambda: self._end_late(replica))
        else:
            self._end(replica)

    def _end_late(self, replica: Replica) -> None:
        if replica.state is not ReplicaState.GONE:
            self._end(replica)

    def _fail(self) -> None:
        ready = [r for r in self._replicas if r.state is ReplicaState.READY]
        if ready:
            self._end(ready[0])
            self._start()

    def _roll(self, old: list[Replica]) -> None:
        """Replace the replicas in `old` one after the other, without an additional replica."""
        while old and old[0].state is not ReplicaState.READY:
            old.pop(0)  # has died, or drains already
        if old:
            self._drain(old[0], lambda: self._start(lambda: self._roll(old[1:])))

    def _autoscale(self) -> None:
        assert self._plan.autoscaler is not None, "the rules must be set; this is a bug"
        self._at(self._now_s + SYNC_S, self._autoscale)
        kept = [r for r in self._replicas if r.state is not ReplicaState.DRAINING]
        ready = [r for r in kept if r.state is ReplicaState.READY]
        self._desired = self._plan.autoscaler.desired(
            self._now_s,
            self._desired,
            [replica.running for replica in ready],
            [replica.waiting for replica in ready],
            len(kept) - len(ready),
        )
        for _ in range(self._desired - len(kept)):
            self._start()
        # Replicas that start go first, then the newest.
        kept.sort(key=lambda r: (r.state is ReplicaState.STARTING, r.number), reverse=True)
        for replica in kept[: max(len(kept) - self._desired, 0)]:
            self._drain(replica)

    def _count(self) -> None:
        ready = sum(replica.state is ReplicaState.READY for replica in self._replicas)
        count = ReplicaCount(self._now_s, ready, len(self._replicas))
        if self._result.counts and self._result.counts[-1].at_s == self._now_s:
            self._result.counts.pop()
        self._result.counts.append(count)
