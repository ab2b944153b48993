"""transformers, `LLM` and the server answer the demo model's held-out prompts equally well.

Caching and chunking are on: the last look-up is asked twice, and the long look-ups (up to 3,000
tokens) are cut into chunks of 512. The answers of transformers are kept in a file. Proofs compute
them again, and ask all prompts. `make test` asks `LLM` and the server 1 prompt of each task, and
look-ups alone with an FP8 cache.
"""

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import omit
from openai.types.chat import ChatCompletionMessage

from demo.evaluate import (
    MAX_ANSWER_TOKENS,
    Prompt,
    Score,
    accuracy_by_task,
    accuracy_table,
    llm_answers,
    load_evaluation,
)
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from tests.evaluation.reference import computed_answers, kept_answers
from tests.process.harness import run_server

CLIENTS = 16
LEAST_ACCURACY = 0.95


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_evaluation()


@pytest.fixture(scope="module")
def reference(prompts: list[Prompt]) -> dict[str, Score]:
    """The scores of transformers."""
    return accuracy_by_task(prompts, kept_answers())


def number_of_prompts(in_make_test: int) -> pytest.MarkDecorator:
    """Parametrize `some` with the number of prompts of each task; 50 in a proof."""
    every = pytest.param(50, marks=pytest.mark.proof)
    return pytest.mark.parametrize("some", [in_make_test, every], indirect=True)


@pytest.fixture
def some(
    request: pytest.FixtureRequest, prompts: list[Prompt]
) -> tuple[list[Prompt], dict[str, Score]]:
    """This number of prompts of each task, and the scores of transformers with them."""
    answers = kept_answers()
    by_task: defaultdict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_task[prompt.task].append(index)
    # The last look-ups are the longest.
    chosen = [index for indices in by_task.values() for index in indices[-request.param :]]
    chosen.append(by_task["lookup"][-1])  # again, from the cache
    found = [prompts[index] for index in chosen]
    return found, accuracy_by_task(found, [answers[index] for index in chosen])


def test_transformers_answer_the_held_out_prompts(reference: dict[str, Score]) -> None:
    weak = {task: score for task, score in reference.items() if score.accuracy < LEAST_ACCURACY}
    assert not weak, accuracy_table(reference)


@pytest.mark.proof
def test_transformers_still_give_the_kept_answers() -> None:
    assert computed_answers() == kept_answers()


@pytest.mark.slow
@number_of_prompts(1)
def test_the_offline_engine_scores_as_transformers_do(
    some: tuple[list[Prompt], dict[str, Score]],
) -> None:
    prompts, reference = some
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    with LLM(prefill_budget_tokens=512) as llm:
        ids = [llm.tokenizer.encode_chat(p.messages, {"tools": list(p.tools)}) for p in prompts]
        completions = llm.generate(ids, greedy, progress=False)
        totals = llm.worker.scheduler.totals
    assert isinstance(completions, list)
    assert totals.cached_tokens_total > 2 * 512
    assert totals.overlapped_steps_total > 0
    assert max(c.prompt_tokens for c in completions) > 2 * 512
    assert accuracy_by_task(prompts, [c.text for c in completions]) == reference


@pytest.mark.slow
@number_of_prompts(1)
def test_an_fp8_kv_cache_answers_as_well(some: tuple[list[Prompt], dict[str, Score]]) -> None:
    """Some look-ups find one fact in 3,000 tokens.

    Each other task may miss one answer, so a task of one prompt is not asked.
    """
    prompts, reference = some
    prompts = [each for each in prompts if reference[each.task].total > 1]
    texts = llm_answers(prompts, {"kv_cache_dtype": "fp8", "prefill_budget_tokens": 512})
    scores = accuracy_by_task(prompts, texts)
    assert scores["lookup"] == reference["lookup"]
    for task, score in scores.items():
        # One answer is more than one point.
        assert score.right >= reference[task].right - max(1, score.total // 100), task


def _text(message: ChatCompletionMessage) -> str:
    """Return the text that the model wrote: the content and the calls."""
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    return "\n".join(
        [
            *([message.content] if message.content else []),
            *(
                f'<tool_call>\n{{"name": {json.dumps(call.function.name)}, '
                f'"arguments": {call.function.arguments}}}\n</tool_call>'
                for call in calls
            ),
        ]
    )


@pytest.mark.slow
@pytest.mark.process
@number_of_prompts(1)
def test_the_server_scores_as_transformers_do(
    some: tuple[list[Prompt], dict[str, Score]],
) -> None:
    prompts, reference = some
    with run_server("--max-prefill-length", "512") as server:
        client = server.wait_ready().client()

        def ask(prompt: Prompt) -> tuple[str, int]:
            answer = client.chat.completions.create(
                model="minisgl-demo",
                messages=prompt.messages,  # type: ignore[arg-type]
                tools=prompt.tools or omit,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=MAX_ANSWER_TOKENS,
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            return _text(answer.choices[0].message), details.cached_tokens or 0

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(ask, prompts[:-1]))
        answers.append(ask(prompts[-1]))
    assert answers[-1][1] > 2 * 512
    assert accuracy_by_task(prompts, [text for text, _ in answers]) == reference
