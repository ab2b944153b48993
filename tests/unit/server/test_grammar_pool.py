"""The grammar pool: which grammars the process has, and which results are known already."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minisgl.core import DeadlineExceeded, Grammar
from minisgl.message.messages import CompileGrammar, GrammarResult
from minisgl.server.pools import grammars as grammar_pool
from minisgl.server.pools.grammars import OPEN_JOBS, GrammarPool


class Wire:
    """A pool with the messages that it has sent."""

    def __init__(self) -> None:
        self.sent: list[CompileGrammar] = []
        self.pool = GrammarPool(self.sent.append)

    def submit(self, text: str, client: str = "a") -> "asyncio.Future[GrammarResult]":
        return self.pool.submit(CompileGrammar(kind="regex", text=text), client)

    def answer(self, index: int = 0, **fields: Any) -> None:
        request = self.sent.pop(index)
        grammar = Grammar(source=f"of {request.text}", kind="regex")
        self.pool.receive(GrammarResult(uid=request.uid, grammar=grammar, **fields))

    @property
    def texts(self) -> list[str]:
        return [request.text for request in self.sent]


def run(scenario: Callable[[Wire], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(Wire()))


def fail(result: "asyncio.Future[GrammarResult]") -> None:
    """End a call by an error, and read the error."""
    result.set_exception(DeadlineExceeded("late"))
    result.exception()


def test_process_has_two_grammars_of_each_client() -> None:
    """Regression: 300 grammars of one client stood before the request of another client."""

    async def scenario(wire: Wire) -> None:
        for number in range(300):
            wire.submit(f"a{number}")
        late = wire.submit("b0", "b")
        assert OPEN_JOBS == 2
        assert wire.texts == ["a0", "a1", "b0"]
        assert [request.client for request in wire.sent] == ["a", "a", "b"]
        wire.answer(2)
        assert (await late).grammar.source == "of b0"
        wire.answer(0)
        assert wire.texts == ["a1", "a2"]

    run(scenario)


def test_result_of_an_accepted_grammar_is_known() -> None:
    async def scenario(wire: Wire) -> None:
        first = wire.submit("x")
        wire.answer()
        again = wire.submit("x", "b")
        assert (again.done(), wire.sent) == (True, [])
        assert await again == await first
        wire.pool.submit(CompileGrammar(kind="choice", text="x"), "b")
        assert len(wire.sent) == 1, "another kind is another grammar"

    run(scenario)


def test_equal_grammars_that_wait_are_sent_once_their_result_is_unknown() -> None:
    async def scenario(wire: Wire) -> None:
        same = [wire.submit("x") for _ in range(20)]
        for _ in range(OPEN_JOBS):
            wire.answer()
        assert not wire.sent
        assert {(await result).grammar.source for result in same} == {"of x"}

    run(scenario)


@pytest.mark.parametrize("fields", [{"error": "no"}, {"error": "no", "internal": True}])
def test_refusal_is_not_kept(fields: dict[str, Any]) -> None:
    async def scenario(wire: Wire) -> None:
        refused = wire.submit("x")
        wire.answer(**fields)
        assert (await refused).error == "no"
        wire.submit("x")
        assert wire.texts == ["x"]

    run(scenario)


def test_end_of_a_call_withdraws_its_grammar() -> None:
    """The pool need not wait for the callbacks of a future, which run in the next iteration."""

    async def scenario(wire: Wire) -> None:
        results = [wire.submit(f"a{number}") for number in range(5)]
        results[0].cancel()
        results[2].cancel()
        wire.answer()  # of the cancelled grammar that the process has already
        assert wire.texts == ["a1", "a3"]

    run(scenario)


@pytest.mark.parametrize("end", [asyncio.Future.cancel, fail])
def test_end_of_a_call_withdraws_a_grammar_that_becomes_known(
    end: Callable[["asyncio.Future[GrammarResult]"], object],
) -> None:
    """Regression: an InvalidStateError ended the service if the client left at this moment."""

    async def scenario(wire: Wire) -> None:
        first, second, ended, last = (wire.submit("x") for _ in range(4))
        end(ended)
        wire.answer()
        assert wire.texts == ["x"], "the process has the second grammar already"
        wire.answer()
        assert {(await result).grammar.source for result in (first, second, last)} == {"of x"}

    run(scenario)


def test_memory_of_kept_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only characters counted, so short grammars took many times their limit."""
    monkeypatch.setattr(grammar_pool, "_CACHED_BYTES", 10_000)

    async def scenario(wire: Wire) -> None:
        for number in range(100):
            wire.submit(f"a{number}")
            wire.answer()
        assert wire.submit("a99").done(), "the newest result is kept"
        known = [wire.submit(f"a{number}", f"client {number}").done() for number in range(100)]
        assert 10 <= sum(known) <= 20
        assert known == sorted(known), "the oldest results are dropped"

    run(scenario)
