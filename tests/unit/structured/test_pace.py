"""Hostile grammars, at the limits, do not change the pace of other requests.

The pace is counted in steps: a request without a grammar has a token in each step.
"""

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from minisgl.core import Grammar, SamplingParams
from minisgl.llm import LLM
from minisgl.llm.workers import LocalWorker
from minisgl.message.messages import AddReq, StepOutput
from minisgl.structured import processor
from minisgl.structured.service import GrammarService
from tests.process.tiny_model import build_tiny_model
from tests.unit.structured.test_service import HOSTILE, request

FREE = 10_000
TOKENS = 60
ONE_REGEX = Grammar(source=r'{"grammars":[{"lark_grammar":"start: /[0-9]{3}/"}]}', kind="regex")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def hostile(path: str) -> list[Grammar]:
    """The hostile grammars that a tokenizer worker accepts."""
    service = GrammarService(path, (-1, -1))
    accepted = [(kind, value) for kind, value, refusal in HOSTILE if refusal is None]
    results = [service.compile(request(*grammar)) for grammar in accepted]
    service.close()
    assert not [result.error for result in results if result.error]
    return [result.grammar for result in results]


@pytest.fixture
def worker(path: str) -> Iterator[LocalWorker]:
    with LLM(path, device="cpu", max_running_reqs=32) as llm:
        assert isinstance(llm.worker, LocalWorker)
        yield llm.worker


def add(worker: LocalWorker, uid: int, grammar: Grammar | None, tokens: int = TOKENS) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=uid, grammar=grammar)
    worker.send(AddReq(uid=uid, token_ids=b"\x05\0\0\0\x06\0\0\0", sampling=params))


def outputs(worker: LocalWorker) -> Iterator[StepOutput]:
    """The outputs of the steps until the request FREE has ended."""
    while True:
        for output in worker.step():
            yield output
            if any(ended.uid == FREE for ended in output.finished):
                return


def test_request_has_a_token_in_each_step_beside_hostile_grammars(
    worker: LocalWorker, hostile: list[Grammar]
) -> None:
    for uid, grammar in enumerate(hostile):
        add(worker, uid, grammar)
    seen: dict[int, int] = {}
    failed: set[int] = set()
    add(worker, FREE, None)
    for output in outputs(worker):
        if output.uids and FREE in seen:
            assert output.uids.count(FREE) == 1, "a step without a token of the other request"
        for uid in output.uids:
            seen[uid] = seen.get(uid, 0) + 1
        failed |= {ended.uid for ended in output.finished if ended.error}
    assert seen[FREE] == TOKENS
    assert {*seen} | failed == {FREE, *range(len(hostile))}, "every grammar was matched"


def test_request_has_its_tokens_while_a_grammar_compiles(worker: LocalWorker) -> None:
    """The compilation ends after 20 tokens of the other request."""
    released = threading.Event()
    compile_grammar: Any = processor.compile_grammar

    def slow(*arguments: Any) -> Any:
        assert released.wait(60), "nothing released the compilation"
        return compile_grammar(*arguments)

    order: list[int] = []
    with patch.object(processor, "compile_grammar", slow):
        add(worker, 1, ONE_REGEX)
        add(worker, FREE, None, tokens=1900)
        for output in outputs(worker):
            order += output.uids
            if order.count(FREE) == 20:
                released.set()
            if 1 in order:
                break
    assert order[:20] == [FREE] * 20
    assert 1 in order, "the request with the grammar ran after its compilation"
