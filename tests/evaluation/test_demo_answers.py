"""transformers, `LLM` and the server answer the demo model's held-out prompts equally well.

Caching and chunking are on: conversations share prefixes, and the long look-ups (up to 3,000
tokens) are cut into chunks of 512.
"""

import json
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
    transformers_answers,
)
from minisgl.core import SamplingParams
from minisgl.demo import model_path
from minisgl.llm import LLM
from tests.process.harness import run_server

CLIENTS = 16
LEAST_ACCURACY = 0.95


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_evaluation()


@pytest.fixture(scope="module")
def reference(prompts: list[Prompt]) -> dict[str, Score]:
    """The scores of transformers."""
    texts = transformers_answers(prompts, model_path(), "cpu", "float32")
    return accuracy_by_task(prompts, texts)


@pytest.mark.slow
def test_transformers_answer_the_held_out_prompts(reference: dict[str, Score]) -> None:
    weak = {task: score for task, score in reference.items() if score.accuracy < LEAST_ACCURACY}
    assert not weak, accuracy_table(reference)


@pytest.mark.slow
def test_the_offline_engine_scores_as_transformers_do(
    prompts: list[Prompt], reference: dict[str, Score]
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    with LLM(prefill_budget_tokens=512) as llm:
        ids = [llm.tokenizer.encode_chat(p.messages, {"tools": list(p.tools)}) for p in prompts]
        completions = llm.generate(ids, greedy, progress=False)
        totals = llm.worker.scheduler.totals
    assert isinstance(completions, list)
    assert totals.cached_tokens_total > 0
    assert totals.overlapped_steps_total > 0
    assert max(c.prompt_tokens for c in completions) > 2 * 512
    assert accuracy_by_task(prompts, [c.text for c in completions]) == reference


@pytest.mark.slow
def test_an_fp8_kv_cache_answers_as_well(
    prompts: list[Prompt], reference: dict[str, Score]
) -> None:
    """Some look-ups find one fact in 3,000 tokens."""
    texts = llm_answers(prompts, {"kv_cache_dtype": "fp8", "prefill_budget_tokens": 512})
    scores = accuracy_by_task(prompts, texts)
    assert scores["lookup"] == reference["lookup"]
    for task, score in scores.items():
        # A task has 50 prompts, so one answer is more than one point.
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
def test_the_server_scores_as_transformers_do(
    prompts: list[Prompt], reference: dict[str, Score]
) -> None:
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
            answers = list(pool.map(ask, prompts))
    assert sum(cached for _, cached in answers) > 0
    assert accuracy_by_task(prompts, [text for text, _ in answers]) == reference
