"""The offline LLM, on the demo model."""

import dataclasses
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.core import ConfigError, FinishReason, InvalidRequest, SamplingParams
from minisgl.demo import model_path
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.step import StepLauncher
from minisgl.kvcache.memory import Memory
from minisgl.llm import LLM, Completion
from minisgl.llm.workers import LocalWorker
from tests.unit.scheduler.integrity import check_scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SPELL = [{"role": "user", "content": "Spell the word planet."}]
ADD = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=512, max_seq_len=512) as llm:
        yield llm


def test_random_weights_need_no_weight_files(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, tmp_path)
    with LLM(str(tmp_path), dummy_weight=True, num_pages=64, max_seq_len=64) as model:
        assert one(model.generate("hello", GREEDY, progress=False)).token_ids


def one(result: Completion | list[Completion]) -> Completion:
    assert isinstance(result, Completion)
    return result


def test_one_prompt_gives_a_completion_and_a_list_gives_a_list(llm: LLM) -> None:
    single = one(llm.chat(ADD, GREEDY, progress=False))
    assert (single.text, single.finish_reason) == ("42", FinishReason.STOP)
    many = llm.chat([SPELL, ADD], [GREEDY, GREEDY], progress=False)
    assert isinstance(many, list)
    assert [c.text for c in many] == ["p-l-a-n-e-t", "42"]


def test_a_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text = llm.tokenizer.render_chat(SPELL)
    ids = llm.tokenizer.encode_chat(SPELL)
    from_text = one(llm.generate(text, GREEDY, progress=False))
    from_ids = one(llm.generate(ids, GREEDY, progress=False))
    assert from_text.text == from_ids.text == "p-l-a-n-e-t"
    assert from_ids.prompt_tokens == len(ids)


def test_stream_concatenates_to_the_whole_text(llm: LLM) -> None:
    prompts = [llm.tokenizer.encode_chat(SPELL), llm.tokenizer.encode_chat(ADD)]
    texts, ends = ["", ""], []
    for piece in llm.stream(prompts, GREEDY):
        texts[piece.index] += piece.text
        if piece.completion is not None:
            ends.append((piece.index, piece.completion.text))
    assert texts == ["p-l-a-n-e-t", "42"]
    assert sorted(ends) == [(0, "p-l-a-n-e-t"), (1, "42")]


Unequal = tuple[list[list[int]], list[SamplingParams], list[list[int]]]
UNEQUAL = [5, None, 1, 30, 12, None, 30, 2]
"""max_tokens of the prompts. Sorting them moves almost every prompt."""


@pytest.fixture(scope="module")
def unequal(llm: LLM) -> Unequal:
    """Prompts without shared prefixes, their parameters, and the answer to each alone."""
    room = llm.facts.max_seq_len
    prompts = [
        [20 + 3 * i, 7, 5 + i] * (room // 3 - 5 if max_tokens is None else i + 1)
        for i, max_tokens in enumerate(UNEQUAL)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for max_tokens in UNEQUAL
    ]
    alone = [
        one(llm.generate(prompt, param, progress=False)).token_ids
        for prompt, param in zip(prompts, params, strict=True)
    ]
    return prompts, params, alone


def test_results_are_in_the_order_of_the_prompts(llm: LLM, unequal: Unequal) -> None:
    """The LLM submits prompts with the highest max_tokens first, and sorts the results."""
    prompts, params, alone = unequal
    results = llm.generate(prompts, params, progress=False)
    assert isinstance(results, list)
    assert [result.token_ids for result in results] == alone
    assert [result.prompt_tokens for result in results] == [len(prompt) for prompt in prompts]
    room = llm.facts.max_seq_len
    for prompt, max_tokens, tokens in zip(prompts, UNEQUAL, alone, strict=True):
        assert len(tokens) == (room - len(prompt) if max_tokens is None else max_tokens)


def test_pieces_have_the_index_of_their_prompt(llm: LLM, unequal: Unequal) -> None:
    prompts, params, alone = unequal
    texts, ends = [""] * len(prompts), {}
    for piece in llm.stream(prompts, params):
        texts[piece.index] += piece.text
        if piece.completion is not None:
            ends[piece.index] = piece.completion
    assert [ends[index].token_ids for index in range(len(prompts))] == alone
    assert [ends[index].text for index in range(len(prompts))] == texts


def test_the_highest_max_tokens_is_submitted_first_and_equal_ones_in_order() -> None:
    with LLM(num_pages=64, max_seq_len=64, max_running_reqs=1, cache_type="naive") as llm:
        greedy = [SamplingParams(temperature=0.0, max_tokens=max_tokens) for max_tokens in UNEQUAL]
        pieces = llm.stream([[5, 6, 7 + index] for index in range(len(UNEQUAL))], greedy)
        ends = [piece.index for piece in pieces if piece.completion is not None]
    assert ends == [1, 5, 3, 6, 4, 0, 7, 2]


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    found = one(llm.chat(SPELL, GREEDY, stop=["a-n"], progress=False))
    assert (found.text, found.finish_reason) == ("p-l-", FinishReason.STOP)
    assert len(found.token_ids) < len(one(llm.chat(SPELL, GREEDY, progress=False)).token_ids)
    assert llm.worker.scheduler.idle


def test_leaving_a_stream_early_aborts_the_rest(llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    for _ in llm.stream(llm.tokenizer.encode_chat(SPELL), endless):
        break
    assert llm.worker.scheduler.idle
    check_scheduler(llm.worker.scheduler)
    assert one(llm.chat(ADD, GREEDY, progress=False)).text == "42"


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM) -> None:
    too_long = [5] * (llm.facts.max_seq_len + 1)
    results = llm.generate([too_long, llm.tokenizer.encode_chat(ADD)], GREEDY, progress=False)
    assert isinstance(results, list)
    assert results[0].finish_reason is FinishReason.ERROR
    assert "context length" in str(results[0].error)
    assert results[1].text == "42"


def test_completions_have_the_log_probabilities(llm: LLM) -> None:
    """The values equal the values of the same tokens in a prompt. Regression: no values."""
    prompt = [*llm.tokenizer.encode_text("planet")]  # not a chat, so that the model is uncertain
    asked = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    found = one(llm.generate(prompt, asked, progress=False))
    assert [each.token_id for each in found.logprobs] == found.token_ids
    text = llm.tokenizer.vocabulary.decode(found.token_ids, skip_special=False)
    assert "".join(each.text for each in found.logprobs) == text
    assert [each.top[0] for each in found.logprobs] == [
        dataclasses.replace(each, top=()) for each in found.logprobs
    ]
    assert not found.prompt_logprobs
    assert min(each.logprob for each in found.logprobs) < -1
    again = SamplingParams(max_tokens=1, prompt_logprobs=0)
    whole = one(llm.generate([*prompt, *found.token_ids], again, progress=False))
    prompt_logprobs = [each.logprob for each in whole.prompt_logprobs]
    ids = [*prompt, *found.token_ids]
    assert [each.token_id for each in whole.prompt_logprobs] == ids[1:]
    logprobs = [each.logprob for each in found.logprobs]
    assert prompt_logprobs[len(prompt) - 1 :] == pytest.approx(logprobs, abs=1e-3)
    stopped = one(llm.chat(SPELL, asked, stop="n", progress=False))
    assert stopped.text == "p-l-a-"
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_parameters_by_name_replace_those_of_the_sampling(llm: LLM) -> None:
    assert one(llm.chat(ADD, temperature=0.0, max_tokens=24, progress=False)).text == "42"
    short = llm.generate(["a", "b"], GREEDY, max_tokens=2, ignore_eos=True, progress=False)
    assert isinstance(short, list)
    assert [len(each.token_ids) for each in short] == [2, 2]
    (*_, last) = llm.stream("a", GREEDY, max_tokens=3, ignore_eos=True)
    assert last.completion is not None
    assert len(last.completion.token_ids) == 3
    for wrong, message in (
        ({"temperature": 9}, "temperature must be from 0 to 2, not 9"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temprature": 1}, "no parameter 'temprature'; did you mean 'temperature'"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate("a", GREEDY, progress=False, **wrong)


def test_a_lone_surrogate_is_refused(llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a\ud800"),
        lambda: llm.chat([{**ADD[0], "content": "\ud800"}]),
    ):
        with pytest.raises(InvalidRequest, match="surrogate"):
            call()
    assert one(llm.chat(ADD, GREEDY, progress=False)).text == "42"


def test_limits_of_one_input_leave_shared_parameters_alone(llm: LLM) -> None:
    """One long prompt shortened the outputs of all prompts."""
    room = llm.facts.max_seq_len
    shared = SamplingParams(temperature=0.0, ignore_eos=True)
    long, short = [7] * (room - 3), [7] * (room - 40)
    results = llm.generate([long, short], shared, progress=False)
    assert isinstance(results, list)
    assert [len(r.token_ids) for r in results] == [3, 40]
    assert shared.max_tokens is None


def test_wrong_parameters_are_refused_before_any_request_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate([5], SamplingParams(temperature=float("nan")), progress=False)
    with pytest.raises(InvalidRequest, match="sampling has 1 entries for 2 prompts"):
        llm.generate([[5], [6]], [GREEDY], progress=False)
    with pytest.raises(InvalidRequest, match="32 bits"):
        llm.generate([2**40], GREEDY, progress=False)
    assert llm.worker.scheduler.idle


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [None], [1.5], [[1.5, 2]], [["1"]], [[[1]]]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be text or a sequence of token ids"):
        llm.generate(prompt, GREEDY, progress=False)
    assert llm.worker.scheduler.idle


NO_LISTS: list[Any] = [None, 5, {"role": "user"}, [None], "Hello", ["Hello"], [[]]]
WRONG_MESSAGES: list[Any] = [[{"role": "user"}], [{"content": "a"}], [{**ADD[0], "content": 5}]]


@pytest.mark.parametrize("conversation", [*NO_LISTS, *WRONG_MESSAGES, [ADD[0], "b"]])
def test_a_conversation_that_is_no_list_of_messages_is_refused(llm: LLM, conversation: Any) -> None:
    with pytest.raises(InvalidRequest, match="a conversation must be a list of messages"):
        llm.chat(conversation, GREEDY, progress=False)


def test_token_ids_may_be_an_array_or_bytes(llm: LLM) -> None:
    ids = [5, 6, 7]
    listed = one(llm.generate(ids, GREEDY, progress=False)).token_ids
    assert one(llm.generate(np.array(ids), GREEDY, progress=False)).token_ids == listed
    (completion,) = llm.generate([np.array(ids)], GREEDY, progress=False)  # type: ignore[misc]
    assert completion.token_ids == listed
    same = one(llm.generate([*b"\5\0\0\0"], GREEDY, progress=False))
    assert one(llm.generate(b"\5\0\0\0", GREEDY, progress=False)) == same, (
        "four ids, not the one int32 id 5"
    )


@pytest.mark.parametrize("stop", [["b", ""], "", [5], 5, None])
def test_stop_must_be_strings(llm: LLM, stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop must"):
        llm.generate([5], GREEDY, stop=stop, progress=False)


def test_stop_strings_do_not_count_before_min_tokens(llm: LLM) -> None:
    """The server follows the same rule."""
    late = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=20)
    assert one(llm.chat(SPELL, late, stop="a-n", progress=False)).text.startswith("p-l-a-n")


def test_a_single_stop_string_is_not_split_into_letters(llm: LLM) -> None:
    found = one(llm.chat(SPELL, GREEDY, stop="a-n", progress=False))
    assert found.text == "p-l-"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": [5]}, "logit_bias"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused(
    llm: LLM, given: dict[str, Any], words: str
) -> None:
    """Regression: 2.5 became 2, or the ranks failed to decode it and ended."""
    with pytest.raises(InvalidRequest, match=words):
        llm.generate([5], SamplingParams(**given), progress=False)
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        llm.generate([[5]], [given], progress=False)  # type: ignore[list-item]


def test_stop_token_ids_may_be_a_list(llm: LLM) -> None:
    """Regression: the scheduler failed to join a list of stop ids and a tuple of EOS ids."""
    listed: Any = [5]
    sampling = SamplingParams(temperature=0.0, max_tokens=3, min_tokens=2, stop_token_ids=listed)
    assert one(llm.generate([5], sampling, progress=False)).error is None


def test_a_call_during_an_open_stream_is_refused(llm: LLM) -> None:
    """Regression: the call failed with a KeyError, and then the stream waited forever."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    stream = llm.stream([5, 6], long)
    next(stream)
    with pytest.raises(InvalidRequest, match="one call at a time"):
        llm.generate([7], GREEDY, progress=False)
    assert sum(piece.completion is not None for piece in stream) == 1
    assert one(llm.chat(ADD, GREEDY, progress=False)).text == "42"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT. A shell that runs the tests in the background has set it to ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("max_tokens", [1, 30])
@pytest.mark.parametrize(
    "where", [(StepLauncher, "pick"), (LaunchedStep, "wait"), (Memory, "publish")]
)
def test_an_llm_is_usable_after_a_keyboard_interrupt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], max_tokens: int
) -> None:
    """Regression: an interrupt while the engine read a result made the next call wait forever, and
    an interrupt at another point lost pages."""
    assert isinstance(llm.worker, LocalWorker)
    scheduler = llm.worker.scheduler
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    alone = one(llm.generate([5, 6, 7], sampling, progress=False)).token_ids
    done = getattr(*where)
    calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            signal.raise_signal(signal.SIGINT)
        return done(*args)

    with monkeypatch.context() as patched:
        patched.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8, 9]], sampling, progress=False)
    assert calls > 0
    assert scheduler.idle
    check_scheduler(scheduler)
    assert one(llm.generate([5, 6, 7], sampling, progress=False)).token_ids == alone


def test_a_stream_of_a_closed_llm_raises_config_error() -> None:
    """Regression: the stream failed in the engine, or at a closed socket."""
    with LLM(num_pages=64, max_seq_len=64) as llm:
        stream = llm.stream([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
    with pytest.raises(ConfigError, match="this LLM is closed"):
        list(stream)
    llm.close()


def test_the_first_step_starts_before_all_prompts_are_submitted(llm: LLM) -> None:
    """When the last prompt is refused, the requests of the first step are aborted."""
    prompts = [[index + 1, index + 2] for index in range(40)]
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    alone = [one(llm.generate(prompt, greedy, progress=False)).token_ids for prompt in prompts]
    assert isinstance(llm.worker, LocalWorker)
    before = llm.worker.scheduler.totals.prefill_tokens_total
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate([*prompts, "a\ud800"], greedy, progress=False)
    assert llm.worker.scheduler.totals.prefill_tokens_total > before
    assert llm.worker.scheduler.idle
    together = llm.generate(prompts, greedy, progress=False)
    assert isinstance(together, list)
    assert [completion.token_ids for completion in together] == alone


def test_equal_seeds_give_equal_tokens(llm: LLM) -> None:
    hot = SamplingParams(temperature=2.0, seed=3, max_tokens=12, ignore_eos=True)
    first = one(llm.generate([5, 6, 7], hot, progress=False)).token_ids
    second = llm.generate([[5, 6, 7], [9, 9], [5, 6, 7]], hot, progress=False)
    assert isinstance(second, list)
    assert second[0].token_ids == second[2].token_ids == first
    fresh = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    draws = {tuple(one(llm.generate([5, 6], fresh, progress=False)).token_ids) for _ in range(4)}
    assert len(draws) > 1


def test_two_llms_exist_side_by_side(llm: LLM) -> None:
    with LLM(num_pages=64, page_size=4, cache_type="naive", overlap=False) as other:
        assert one(other.chat(ADD, GREEDY, progress=False)).text == "42"
        assert one(llm.chat(ADD, GREEDY, progress=False)).text == "42"
