"""The workers of an `LLM`: a scheduler in the caller's process, or one process for each rank."""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Collection, Iterator

from minisgl.core import (
    ConfigError,
    EngineConfig,
    EngineError,
    MinisglError,
    ModelFacts,
    SchedulerConfig,
    StepCost,
    WorkerDied,
)
from minisgl.distributed.comm import SingleCommunicator
from minisgl.drafts import with_speculation
from minisgl.engine import Engine, Extensions
from minisgl.message import messages
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.models.config import draft_method
from minisgl.quantization import with_quantizations
from minisgl.scheduler import LocalInbox, build_scheduler
from minisgl.settings.child import ChildSpec
from minisgl.settings.config import ServerConfig
from minisgl.structured.processor import with_grammars
from minisgl.utils import socket_folder, supervise

_POLL_S = 0.2  # the longest time between two checks that the ranks are alive
_EXIT_POLL_S = 0.01  # the time between two checks that a rank has ended
_FIRST_STEP_REQS = 32  # the first step starts as soon as this many requests are submitted
_SHUTDOWN_S = 5.0  # time for the ranks to end after a Shutdown message


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Deliver a Ctrl-C after the block instead of inside it.

    An interrupt in the middle of a step would lose pages, or make the scheduler wait forever for a
    result that it has already read. An interrupt while an output of the ranks is read would lose
    that output.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield  # a foreign handler, or a thread other than the main one, gets no KeyboardInterrupt
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


class LocalWorker:
    """A scheduler and an engine of one rank in the caller's process."""

    def __init__(
        self,
        engine: EngineConfig,
        config: SchedulerConfig,
        extensions: Extensions,
        cost: StepCost | None = None,
    ) -> None:
        """cost: as for build_scheduler."""
        budget = config.prefill_budget_tokens
        grammars = with_grammars(engine.model_path, extensions)
        self.extensions = with_speculation(draft_method(engine), with_quantizations(grammars))
        self._engine = Engine(engine, SingleCommunicator(), budget, self.extensions)
        self._inbox = LocalInbox()
        self._outputs: list[messages.StepOutput] = []
        self._failed = False
        try:
            send = self._outputs.append
            self.scheduler = build_scheduler(self._engine, config, self._inbox, send, cost)
        except BaseException:
            self._engine.close()
            raise
        self.facts = self._engine.facts()

    def send(self, message: messages.ToScheduler) -> None:
        """Queue a message.

        The first step starts once _FIRST_STEP_REQS messages are queued. The caller tokenises the
        other prompts while that step runs.
        """
        self._inbox.messages.append(message)
        if self.scheduler.idle and len(self._inbox.messages) >= _FIRST_STEP_REQS:
            self._iterate()

    def _iterate(self) -> None:
        """Run one iteration. Raises EngineError when an earlier one has failed.

        A failed iteration may leave requests that never end, so nothing may wait for them.
        """
        if self._failed:
            raise EngineError("an earlier step of this LLM has failed; close it")
        with _uninterrupted():
            self._failed = True
            self.scheduler.iterate()
            self._failed = False

    def step(self) -> list[messages.StepOutput]:
        """Run one iteration and return all outputs since the last call. Raises EngineError."""
        self._iterate()
        outputs = self._outputs.copy()
        self._outputs.clear()
        return outputs

    def abort_and_wait(self, uids: Collection[int]) -> None:
        """Abort the requests `uids`, and return when every request has ended."""
        self._inbox.messages.extend(messages.AbortReq(uid=uid) for uid in uids)
        with _uninterrupted():
            while not self._failed and (self._inbox.messages or not self.scheduler.idle):
                self.step()

    def close(self) -> None:
        """Wait for the step in flight and free the engine's memory."""
        if not self._failed:
            self.scheduler.drain_in_flight()
        self._engine.close()


class RankWorkers:
    """All tensor-parallel ranks as processes, with the interface of LocalWorker.

    This class starts the ranks as the server does. They end with the caller's process, and when
    this object is garbage-collected. On Linux they also end with the thread that created the LLM.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Start the ranks and wait until all are ready.

        Raises ConfigError or WorkerDied when a rank ends before it is ready.
        """
        own_folder = contextlib.ExitStack()
        folder = own_folder.enter_context(socket_folder())
        self.children: list[supervise.Child] = []
        self._lost: MinisglError | None = None
        self._unfinished: set[int] = set()  # uids whose last output has not been received
        self._outputs = Receiver(endpoint(folder, "detokenizer"), messages.StepOutput)
        self._status: Receiver[messages.ToApi] = Receiver(endpoint(folder, "api"), messages.ToApi)
        self._requests: Sender[messages.ToScheduler] = Sender(endpoint(folder, "scheduler"))
        self._reasons, reason_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._clean_up = weakref.finalize(self, _clean_up, self.children, self._reasons, own_folder)
        try:
            for rank in range(config.engine.tp_size):
                spec = ChildSpec(
                    role="scheduler",
                    index=rank,
                    socket_dir=folder,
                    reason_fd=reason_fd,
                    config=config,
                )
                self.children.append(spec.spawn())
            self.facts = self._await_ready()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reason_fd)

    @_uninterrupted()
    def send(self, message: messages.ToScheduler) -> None:
        """Send a message to rank 0."""
        if isinstance(message, messages.AddReq):
            self._unfinished.add(message.uid)
        self._requests.send(message)

    @_uninterrupted()
    def step(self) -> list[messages.StepOutput]:
        """Wait at most _POLL_S for outputs and return all that have arrived. Raises WorkerDied."""
        self._raise_if_lost()
        list(self._status.drain())  # the LLM does not use the statistics
        outputs = list(self._outputs.drain()) if self._outputs.poll(_POLL_S) else []
        self._unfinished -= {finished.uid for output in outputs for finished in output.finished}
        return outputs

    def abort_and_wait(self, uids: Collection[int]) -> None:
        """Abort the requests `uids`, and return when every request has ended."""
        for uid in uids:
            self.send(messages.AbortReq(uid=uid))
        while self._unfinished:
            self.step()

    def close(self) -> None:
        """Send Shutdown to the ranks, and kill those that still run after _SHUTDOWN_S."""
        self.send(messages.Shutdown())
        end_s = time.monotonic() + (_SHUTDOWN_S if hasattr(self, "facts") else 0.0)
        while time.monotonic() < end_s and len(ended := self._ended()) < len(self.children):
            if any(child.exit_code for child in ended):
                break  # a rank has failed, and the others may wait for it forever
            time.sleep(_EXIT_POLL_S)
        for queue in (self._outputs, self._status, self._requests):
            queue.close()
        self._clean_up()

    def _ended(self) -> list[supervise.Child]:
        return [child for child in self.children if child.process.poll() is not None]

    def _await_ready(self) -> ModelFacts:
        ready: dict[str, ModelFacts | None] = {}  # by role; only rank 0 sends facts
        while len(ready) < len(self.children):
            self._raise_if_lost()
            self._status.poll(_POLL_S)
            found = [each for each in self._status.drain() if isinstance(each, messages.Ready)]
            ready |= {message.role: message.facts for message in found}
        return next(facts for facts in ready.values() if facts is not None)

    def _raise_if_lost(self) -> None:
        """Raise an error if a rank has ended. Every later call raises the same error."""
        if self._lost is None and (ended := self._ended()):
            self._lost = self._cause(ended[0])
        if self._lost is not None:
            raise self._lost

    def _cause(self, rank: supervise.Child) -> MinisglError:
        """Return the error of the rank that failed first, after `rank` has ended."""

        def wait(until_s: float) -> None:
            time.sleep(_EXIT_POLL_S)
            self._ended()

        reasons = supervise.read_reasons(self._reasons)
        supervise.await_killed(self.children, wait)
        ended = [rank, *self._ended()]
        child = supervise.first_failed(ended, self.children, reasons)
        code = child.process.wait()  # returns soon: a rank ends right after its report
        kind = ConfigError if code == supervise.CONFIG_EXIT else WorkerDied
        return kind(child.explain(reasons))


def _clean_up(
    children: list[supervise.Child], reasons_fd: int, folder: contextlib.ExitStack
) -> None:
    """Kill the processes of a RankWorkers and remove its pipes and its folder of sockets."""
    for child in children:
        child.process.kill()
        child.process.wait()
    os.close(reasons_fd)
    folder.close()
