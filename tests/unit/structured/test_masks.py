"""The masks of a step: the rows of one client are computed within a limit of time."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from minisgl.core import Grammar, SamplingParams
from minisgl.engine.logits_processing import MaskedRows
from minisgl.message.stats import ConstraintTotals
from minisgl.structured.library import compile_grammar
from minisgl.structured.masks import MAX_CLIENT_S, MaskComputer, Position
from minisgl.structured.matcher import MAX_PREPARED_S, Compiled, GrammarState

CPU = torch.device("cpu")
PROMPT = 4
GRAMMAR = Grammar(source=LLMatcher.grammar_from_regex("[ab]{40}"), kind="regex")


class Clock:
    """Each mask takes `cost_s`."""

    def __init__(self, cost_s: float) -> None:
        self.now_s = 0.0
        self.cost_s = cost_s

    def __call__(self) -> float:
        self.now_s += self.cost_s
        return self.now_s


@pytest.fixture
def computer(tokenizer: LLTokenizer) -> Iterator[MaskComputer]:
    loaded: Future[LLTokenizer] = Future()
    loaded.set_result(tokenizer)
    computer = MaskComputer(loaded)
    computer._group = 1
    return computer


def states(tokenizer: LLTokenizer, count: int) -> list[GrammarState]:
    def prepare(state: GrammarState, tokens: list[int]) -> Future[float]:
        future: Future[float] = Future()
        future.set_result(state.compute_ahead(tokens, tokenizer))
        return future

    opened = []
    for _ in range(count):
        compiled: Future[Compiled] = Future()
        compiled.set_result(Compiled(compile_grammar(tokenizer, GRAMMAR), 0.0))
        params = SamplingParams(grammar=GRAMMAR)
        common = (0,), ConstraintTotals(), prepare
        state = GrammarState(params, GRAMMAR, lambda *_, result=compiled: result, *common)
        state.start("")
        assert state.prepared()
        assert state.unseen(PROMPT, PROMPT) == 0
        opened.append(state)
    return opened


def positions(
    states: Sequence[GrammarState], first: int = 0, tokens: Sequence[int] = ()
) -> list[Position]:
    return [Position(state, first + i, [], tokens) for i, state in enumerate(states)]


def rows_of(masks: MaskedRows) -> tuple[list[int], list[int]]:
    """The rows with a mask, and the rows that get no token."""
    withheld = [] if masks.withheld is None else masks.withheld.tolist()
    return masks.rows.tolist(), withheld


def test_rows_of_a_client_above_its_time_get_no_mask(
    computer: MaskComputer, tokenizer: LLTokenizer
) -> None:
    computer._clock = Clock(0.3 * MAX_CLIENT_S)
    first, second = states(tokenizer, 10), states(tokenizer, 3)
    clients = {"first": positions(first), "second": positions(second, first=20)}
    masks = computer.compute(clients, CPU)
    assert rows_of(masks) == ([0, 1, 2, 3, 20, 21, 22], [4, 5, 6, 7, 8, 9])
    assert masks.mask.shape == (7, -(-tokenizer.vocab_size // 32))
    logits = torch.zeros((23, tokenizer.vocab_size))
    masks(logits)
    assert logits[4:10].isnan().all()
    assert not logits[[*range(4), *range(10, 23)]].isnan().any()


def test_the_first_row_of_a_client_gets_its_mask_at_any_cost(
    computer: MaskComputer, tokenizer: LLTokenizer
) -> None:
    computer._clock = Clock(9.0)
    clients = {name: positions(states(tokenizer, 2), row) for row, name in ((0, "a"), (5, "b"))}
    assert rows_of(computer.compute(clients, CPU)) == ([0, 5], [1, 6])


def test_a_withheld_mask_that_another_thread_has_computed_comes_first(
    computer: MaskComputer, tokenizer: LLTokenizer
) -> None:
    """It takes no time, so it is withheld at most once."""
    computer._clock = Clock(9.0)
    opened = states(tokenizer, 4)
    letter = tokenizer.tokenize_str("a")[0]
    masks = computer.compute({"": positions(opened, tokens=[letter])}, CPU)
    assert rows_of(masks) == ([0], [1, 2, 3])
    for state in opened[2:]:
        state.prepare(torch.tensor([0] * PROMPT + [letter]).numpy())
        assert state.prepared()
        assert state.unseen(PROMPT + 1, PROMPT) == 0, "the other thread has followed the output"
    again = positions(opened[:2], tokens=[letter]) + positions(opened[2:], first=2)
    masks = computer.compute({"": again}, CPU)
    assert rows_of(masks) == ([2, 3, 0], [1])
    assert (masks.mask[0] == masks.mask[1]).all()
    assert masks.mask.any()


def test_the_library_does_not_compute_a_ready_mask_again(
    computer: MaskComputer, tokenizer: LLTokenizer
) -> None:
    """Regression: the masks of 20 ready rows took 6 ms of a step."""
    (state,) = states(tokenizer, 1)
    expected = computer.compute({"": positions([state])}, CPU).mask
    state.prepare(torch.zeros(PROMPT, dtype=torch.int32).numpy())
    del computer._library
    again = computer.compute({"": positions([state])}, CPU)
    assert again.rows.tolist() == [0]
    assert (again.mask == expected).all()


def test_a_request_whose_masks_take_too_long_in_all_has_an_error(tokenizer: LLTokenizer) -> None:
    (state,) = states(tokenizer, 1)
    state.prepare_mask = lambda state, tokens: spent
    for total, failed in ((0.5, False), (1.0, False), (1.5, True)):
        spent: Future[float] = Future()
        state.prepare(torch.zeros(PROMPT, dtype=torch.int32).numpy())
        assert not state.prepared()
        spent.set_result(0.5 * MAX_PREPARED_S)
        assert state.prepared()
        assert (state.failure(PROMPT) is not None) == failed, total
    error = state.failure(PROMPT)
    assert error is not None
    assert (error.code, "0.25 s of CPU time" in error.message) == ("grammar_too_complex", True)
