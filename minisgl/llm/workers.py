"""What computes for an `LLM`: a scheduler in its own process, or one process for each rank."""

import contextlib
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Collection, Iterator

import msgspec

from minisgl.core import (
    ConfigError,
    EngineConfig,
    MinisglError,
    ModelFacts,
    SchedulerConfig,
    WorkerDied,
)
from minisgl.distributed import SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, Extensions
from minisgl.message import (
    AbortReq,
    AddReq,
    Ready,
    Receiver,
    SchedulerStats,
    Sender,
    Shutdown,
    StepOutput,
    ToScheduler,
    endpoint,
)
from minisgl.scheduler import LocalInbox, build_scheduler
from minisgl.server.config import ChildSpec, ServerConfig
from minisgl.utils import make_socket_dir, supervise

_LOOK_S = 0.2  # how often, at least, it is looked whether the ranks live
_FIRST_REQS = 32  # with which a first step begins before all have come
_LEAVE_S = 5.0  # for ranks to end by themselves


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts afterwards: a scheduler left in the middle of a step loses pages, or waits
    without end for a result that it was about to read; so would we for an output of ranks."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if asked:
            signal.raise_signal(signal.SIGINT)


class LocalWorker:
    """One rank in the caller's process: takes requests, gives what comes of them."""

    def __init__(
        self,
        engine: EngineConfig,
        config: SchedulerConfig,
        extensions: Extensions = DEFAULT_EXTENSIONS,
    ) -> None:
        budget = config.prefill_budget_tokens
        self._engine = Engine(engine, SingleCommunicator(), budget, extensions)
        self._inbox = LocalInbox()
        self._outputs: list[StepOutput] = []
        try:
            send = self._outputs.append
            self.scheduler = build_scheduler(self._engine, config, self._inbox, send)
        except BaseException:
            self._engine.close()
            raise
        self.facts = self._engine.facts()

    def send(self, message: ToScheduler) -> None:
        self._inbox.messages.append(message)
        if self.scheduler.idle and len(self._inbox.messages) >= _FIRST_REQS:
            with _uninterrupted():
                self.scheduler.iterate()  # the caller makes the rest ready while this step runs

    def step(self) -> list[StepOutput]:
        """What has come since; blocks for a step at most. Raises EngineError when none can come."""
        with _uninterrupted():
            self.scheduler.iterate()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def settle(self, uids: Collection[int]) -> None:
        """Abort these, and return when every request has ended."""
        self._inbox.messages.extend(AbortReq(uid=uid) for uid in uids)
        with _uninterrupted():
            while self._inbox.messages or not self.scheduler.idle:
                self.step()

    def close(self) -> None:
        self.scheduler.drain_in_flight()
        self._engine.close()


class RankWorkers:
    """A LocalWorker's like with all ranks as processes, started as the server starts them: they end
    with this one, or when nobody refers to it any more.

    (Linux ends them with the thread that made the LLM, if that ends earlier.)
    """

    def __init__(self, engine: EngineConfig, config: SchedulerConfig) -> None:
        """Blocks until all are ready. Raises ConfigError or WorkerDied when one ends instead."""
        folder = make_socket_dir()
        self.children: list[supervise.Child] = []
        self._lost: MinisglError | None = None
        self._unfinished: set[int] = set()  # uids whose last output has not been received
        self._outputs = Receiver(endpoint(folder, "detokenizer"), StepOutput)
        self._status: Receiver[Ready | SchedulerStats] = Receiver(
            endpoint(folder, "api"), Ready | SchedulerStats
        )
        self._requests: Sender[ToScheduler] = Sender(endpoint(folder, "scheduler"))
        self._reasons, reason_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._clean_up = weakref.finalize(self, _clean_up, self.children, self._reasons, folder)
        spec = ChildSpec(
            role="scheduler",
            index=0,
            parent_pid=os.getpid(),
            socket_dir=folder,
            reason_fd=reason_fd,
            config=ServerConfig(
                engine=engine,
                scheduler=config,
                served_names=(engine.model_path,),
                log_level="warning",
            ),
        )
        try:
            for rank in range(engine.tp_size):
                self.children.append(msgspec.structs.replace(spec, index=rank).spawn())
            self.facts = self._await_ready()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reason_fd)

    @_uninterrupted()
    def send(self, message: ToScheduler) -> None:
        if isinstance(message, AddReq):
            self._unfinished.add(message.uid)
        self._requests.send(message)

    @_uninterrupted()
    def step(self) -> list[StepOutput]:
        self._check()
        list(self._status.drain())  # counters, for nobody
        outputs = list(self._outputs.drain()) if self._outputs.poll(_LOOK_S) else []
        self._unfinished -= {finished.uid for output in outputs for finished in output.finished}
        return outputs

    def settle(self, uids: Collection[int]) -> None:
        for uid in uids:
            self.send(AbortReq(uid=uid))
        while self._unfinished:
            self.step()

    def close(self) -> None:
        self.send(Shutdown())
        end_s = time.monotonic() + (_LEAVE_S if hasattr(self, "facts") else 0.0)
        while time.monotonic() < end_s and len(ended := self._ended()) < len(self.children):
            if any(child.exit_code for child in ended):
                break  # one has failed: the others may wait for it without end
            time.sleep(0.01)
        for queue in (self._outputs, self._status, self._requests):
            queue.close()
        self._clean_up()

    def _ended(self) -> list[supervise.Child]:
        return [child for child in self.children if child.process.poll() is not None]

    def _await_ready(self) -> ModelFacts:
        facts: ModelFacts | None = None
        waiting = {child.role for child in self.children}
        while waiting or facts is None:
            self._check()
            self._status.poll(_LOOK_S)
            for message in self._status.drain():
                if isinstance(message, Ready):
                    waiting.discard(message.role)
                    facts = message.facts or facts
        return facts

    def _check(self) -> None:
        """Raise when a rank has ended, the same each time."""
        if self._lost is None and (ended := self._ended()):
            self._lost = self._cause(ended)
        if self._lost is not None:
            raise self._lost

    def _cause(self, ended: list[supervise.Child]) -> MinisglError:
        """A rank that was killed, else the first that said why: the others then lose a peer."""
        killed = [child for child in ended if (child.exit_code or 0) < 0]
        reasons = supervise.read_reasons(self._reasons)
        said = [child for role in reasons for child in self.children if child.role == role]
        child = [*killed, *said, *ended][0]
        code = child.process.wait()  # who has said why ends at once
        kind = ConfigError if code == supervise.CONFIG_EXIT else WorkerDied
        return kind(child.explain(reasons))


def _clean_up(children: list[supervise.Child], reasons_fd: int, folder: str) -> None:
    """Leave nothing of a RankWorkers behind."""
    for child in children:
        child.process.kill()
        child.process.wait()
        os.close(child.life_fd)
    os.close(reasons_fd)
    shutil.rmtree(folder, ignore_errors=True)
