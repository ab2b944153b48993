"""Several answers to each prompt of an LLM."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from minisgl.core import FinishReason, InvalidRequest, SamplingParams
from minisgl.llm import LLM, Completion
from tests.unit.llm.test_chats import ASKED, WEATHER

HOT = SamplingParams(temperature=2.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=128, max_seq_len=512) as llm:
        yield llm


def many(found: Completion | list[Completion]) -> list[Completion]:
    assert isinstance(found, list)
    return found


def test_each_answer_to_a_prompt_has_the_next_seed(llm: LLM) -> None:
    """As in the server. The log-probabilities are those of the answer's own tokens."""
    alone = [llm.generate([[5, 6, 7]], HOT, seed=seed, progress=False) for seed in range(3, 6)]
    found = many(llm.generate([5, 6, 7], HOT, n=3, progress=False))
    assert [each.token_ids for each in found] == [many(one)[0].token_ids for one in alone]
    for each in found:
        assert [entry.token_id for entry in each.logprobs] == each.token_ids


def test_answers_come_in_the_order_of_the_prompts_and_of_their_numbers(llm: LLM) -> None:
    """The LLM submits the second prompt first, because its max_tokens is higher."""
    params = [msgspec.structs.replace(HOT, max_tokens=most) for most in (4, 9)]
    prompts = [[5, 6], [7, 8, 9]]
    found = many(llm.generate(prompts, params, n=2, progress=False))
    assert [each.prompt_tokens for each in found] == [2, 2, 3, 3]
    assert len({tuple(each.token_ids) for each in found}) == 4
    texts = [""] * 4
    for piece in llm.stream(prompts, params, n=2):
        texts[piece.index] += piece.text
    assert texts == [each.text for each in found]


def test_each_answer_to_a_chat_has_its_own_tool_call(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=90)
    chat = {"tools": [WEATHER], "tool_choice": "required", "progress": False}
    found = many(llm.chat(ASKED, sampling, n=2, **chat))  # type: ignore[arg-type]
    calls = [call for each in found for call in each.tool_calls]
    assert [call.name for call in calls] == ["get_weather"] * 2
    assert calls[0].id != calls[1].id


def test_a_refused_prompt_has_n_refused_answers(llm: LLM) -> None:
    too_long = [5] * (llm.facts.max_seq_len + 1)
    found = many(llm.generate([too_long, [5, 6]], max_tokens=2, n=2, progress=False))
    refused = [each.finish_reason is FinishReason.ERROR for each in found]
    assert refused == [True, True, False, False]


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2", None])
def test_a_number_of_answers_below_one_is_refused(llm: LLM, n: Any) -> None:
    for call in (
        lambda: llm.generate([5], n=n, progress=False),
        lambda: llm.chat(ASKED, n=n, progress=False),
        lambda: llm.stream([5], n=n),
    ):
        with pytest.raises(InvalidRequest, match="at least 1") as caught:
            call()
        assert caught.value.param == "n"
