"""The threads that compile grammars: turns, withdrawal and stack."""

import json
import resource
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest

from minisgl.demo import model_path
from minisgl.message.messages import CompileGrammar
from minisgl.structured.compile_threads import STACK_BYTES, CompileThreads, compile_stack
from minisgl.structured.service import GrammarService
from tests.patience import patience
from tests.unit.structured.test_service import chain


class Held:
    """Jobs that end when the test says so, and the order in which they began."""

    def __init__(self, threads: CompileThreads) -> None:
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._threads = threads
        self._any_began = threading.Semaphore(0)

    def submit(self, client: str, name: str) -> "Future[str]":
        gate = self.gates[name] = threading.Event()

        def job() -> str:
            self.began.append(name)
            self._any_began.release()
            assert gate.wait(patience())
            return name

        return self._threads.submit(client, job)

    def wait_for_jobs(self, count: int) -> None:
        for _ in range(count):
            assert self._any_began.acquire(timeout=patience())


def test_a_client_leaves_a_thread_to_other_clients() -> None:
    """Regression: the grammars of n = 1,000 choices came before a grammar of another client."""
    held = Held(CompileThreads(3))
    first = [held.submit("a", f"a{i}") for i in range(4)]
    held.wait_for_jobs(2)
    other = held.submit("b", "b0")
    held.wait_for_jobs(1)
    assert {*held.began} == {"a0", "a1", "b0"}, "a2 waits although a thread was free"
    for gate in held.gates.values():
        gate.set()
    assert [job.result(patience()) for job in (*first, other)] == ["a0", "a1", "a2", "a3", "b0"]


def test_a_withdrawn_job_does_not_run() -> None:
    held = Held(CompileThreads(2))
    first, second, third = (held.submit("a", f"a{i}") for i in range(3))
    held.wait_for_jobs(1)
    assert second.cancel()
    assert not first.cancel(), "it runs"
    for gate in held.gates.values():
        gate.set()
    assert third.result(patience()) == "a2"
    assert held.began == ["a0", "a2"]


def test_a_withdrawn_job_frees_its_function_at_once() -> None:
    """Regression: the grammars of calls that had ended took memory until their turn."""

    class Function:
        def __call__(self) -> None: ...

    threads = CompileThreads(2)
    held = Held(threads)
    running = held.submit("a", "a0")
    held.wait_for_jobs(1)
    function = Function()
    freed = weakref.ref(function)
    waiting = threads.submit("a", function)
    del function
    assert freed() is not None
    assert waiting.cancel()
    assert freed() is None
    held.gates["a0"].set()
    assert running.result(patience()) == "a0"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_belongs_to_its_job(kind: type[BaseException]) -> None:
    threads = CompileThreads(2)

    def fail() -> None:
        raise kind

    failed, next_job = threads.submit("a", fail), threads.submit("a", lambda: 5)
    with pytest.raises(kind):
        failed.result(patience())
    assert next_job.result(patience()) == 5


def test_the_stacks_of_other_threads_keep_their_size() -> None:
    before = threading.stack_size()
    with compile_stack():
        assert threading.stack_size() == 2 * STACK_BYTES
    assert threading.stack_size() == before
    assert CompileThreads(2).submit("a", lambda: 5).result(patience()) == 5
    assert threading.stack_size() == before


_COMPILE = """
import sys
from minisgl.core import Grammar, SamplingParams
from minisgl.structured.processor import GrammarProcessor
processor = GrammarProcessor(sys.argv[1], (0,))
grammar = Grammar(source=sys.stdin.read(), kind="json_schema")
state = processor.open(SamplingParams(grammar=grammar))
state.start("a")
print(state.prepared(None), state.failure(0))
"""


def _small_stack() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2**20, most))


def test_an_accepted_grammar_compiles_with_a_small_soft_stack_limit() -> None:
    """Regression: with 1 MiB, an accepted schema ended the scheduler by a segmentation fault."""
    service = GrammarService(str(model_path()), (-1, -1))
    request = CompileGrammar(uid=1, kind="json_schema", text=json.dumps(chain(170)))
    result = service.compile(request)
    service.close()
    assert result.error is None
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(model_path())],
        input=result.grammar.source,
        capture_output=True,
        text=True,
        timeout=patience(),
        preexec_fn=_small_stack,
    )
    assert (done.stdout.strip(), done.returncode) == ("True None", 0), done.stderr
