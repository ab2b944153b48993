"""`CompileThreads`: the threads that compile grammars in a scheduler. Clients take turns."""

import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from minisgl.utils.turns import Turns

T = TypeVar("T")

# The stack of the check of a grammar. llguidance recurses once for each $ref or rule. The threads
# that compile an accepted grammar have twice as much.
STACK_BYTES = 3 * 2**19
LOW_PRIORITY = 10  # niceness of work that only its own request waits for


class _Job(NamedTuple):
    client: str
    function: Callable[[], Any]


class CompileThreads:
    """Runs functions in threads with a defined stack. A client leaves one thread to the others.

    A grammar therefore waits for at most one grammar of each other client.

    count: number of threads, at least 2.

    _turns    the futures of the jobs that wait.
    _waiting  the job of each of these futures.
    _running  the number of running jobs of each client.
    """

    def __init__(self, count: int) -> None:
        self._of_client = count - 1
        self._executor = ThreadPoolExecutor(count, "grammar", initializer=_lower_priority)
        self._lock = threading.Lock()
        self._turns: Turns[Future[Any]] = Turns()
        self._waiting: dict[Future[Any], _Job] = {}
        self._running: Counter[str] = Counter()

    def submit(self, client: str, function: Callable[[], T]) -> "Future[T]":
        """Call the function in a thread at the turn of the client.

        Cancelling the returned future withdraws the job, until a thread has begun it.
        """
        future: Future[T] = Future()
        with self._lock:
            self._turns.add(client, future)
            self._waiting[future] = _Job(client, function)
        future.add_done_callback(self._withdraw)
        with compile_stack():
            self._executor.submit(self._run)
        return future

    def run(self, function: Callable[[], T], client: str, here: bool) -> "Future[T]":
        """As `submit`. here: call the function in the calling thread; the future is then done."""
        if not here:
            return self.submit(client, function)
        future: Future[T] = Future()
        _complete(future, function)
        return future

    def _withdraw(self, future: "Future[Any]") -> None:
        """Free a job that has been cancelled. Does nothing if a thread has taken it."""
        with self._lock:
            if (job := self._waiting.pop(future, None)) is not None:
                self._turns.remove(job.client, future)

    def _run(self) -> None:
        """Run jobs until only clients with all their threads have some. These threads run them."""
        while True:
            with self._lock:
                future = self._turns.take(lambda client, _: self._running[client] < self._of_client)
                if future is None:
                    return
                job = self._waiting.pop(future)
                self._running[job.client] += 1
            if future.set_running_or_notify_cancel():
                _complete(future, job.function)
            with self._lock:
                self._running[job.client] -= 1


def _complete(future: "Future[T]", function: Callable[[], T]) -> None:
    try:
        result = function()
    # The caller of Future.result gets the exception.
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(result)


@contextmanager
def compile_stack() -> Iterator[None]:
    """Give the threads that start in the block more stack than a checked grammar needs.

    Otherwise the soft limit of the process decides (`ulimit -s`).
    """
    before = threading.stack_size(2 * STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def raise_stack_limit() -> None:
    """Give the main thread of this process as much stack, if its hard limit allows it.

    The main thread compiles a grammar again if drafts made its matcher fail.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = 2 * STACK_BYTES if most == resource.RLIM_INFINITY else min(2 * STACK_BYTES, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
