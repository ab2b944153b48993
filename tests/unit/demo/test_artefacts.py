"""The files that ship in minisgl/demo: sizes, configuration, and the held-out prompts."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from transformers import AutoConfig, PreTrainedTokenizerFast

from demo.build_evaluation import MAX_LOOKUP_TOKENS, evaluation_text
from demo.evaluate import Prompt, accuracy_by_task, accuracy_table, is_correct, load_evaluation
from demo.generate import training_sample
from demo.lexicon import Lexicon
from demo.tasks import GENERATORS, TOOL_TASKS
from minisgl.demo import evaluation_path, model_path


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_evaluation()


def test_weights_are_at_most_12_megabytes() -> None:
    assert (model_path() / "model.safetensors").stat().st_size <= 12_000_000


def test_configuration() -> None:
    config = AutoConfig.from_pretrained(model_path())
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.head_dim == 64
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 100_000.0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    assert len(tokenizer) == config.vocab_size
    generation = json.loads((model_path() / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation["eos_token_id"] == ends
    assert config.eos_token_id == ends[0]


def test_model_paths_load_nothing_heavy() -> None:
    code = "import sys, minisgl.demo, demo.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_evaluation_is_what_the_held_out_generators_give() -> None:
    assert evaluation_path().read_text(encoding="utf-8") == evaluation_text()
    assert evaluation_path().stat().st_size < 2_000_000


def test_evaluation_covers_every_task(prompts: list[Prompt]) -> None:
    for task in GENERATORS:
        assert sum(prompt.task == task for prompt in prompts) == 50
    assert sum(len(prompt.messages) > 2 for prompt in prompts) >= 70
    assert any(prompt.messages[0]["role"] == "system" for prompt in prompts)


def test_lookups_reach_but_do_not_pass_their_limit(prompts: list[Prompt]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    lengths = [
        len(
            tokenizer(
                tokenizer.apply_chat_template(
                    prompt.messages, tokenize=False, add_generation_prompt=True
                )
            ).input_ids
        )
        for prompt in prompts
        if prompt.task == "lookup"
    ]
    assert max(lengths) <= MAX_LOOKUP_TOKENS
    assert sum(length >= 2700 for length in lengths) >= 5


def test_no_evaluation_prompt_is_ever_trained_on(prompts: list[Prompt]) -> None:
    asked = {
        (
            prompt.messages[-1]["content"].casefold(),
            tuple(tool["function"]["name"] for tool in prompt.tools),
        )
        for prompt in prompts
        if prompt.task
        in {
            "arithmetic",
            "spelling",
            "reversing",
            "sorting",
            "counting",
            "lookup",
            "json",
            "greeting",
            "tool-call",
            "tool-choice",
            "tool-none",
            "tool-parallel",
        }
    }
    rng, lexicon = random.Random(11), Lexicon()
    for _ in range(20_000):
        sample = training_sample(rng, lexicon)
        names = tuple(tool.name for tool in sample.tools)
        for exchange in sample.exchanges:
            assert (exchange.user.casefold(), names) not in asked


def test_tool_prompts_hold_requests_of_an_openai_api(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        assert bool(prompt.tools) == (prompt.task in TOOL_TASKS)
        assert bool(prompt.calls) == (prompt.answer == "")
        names = {tool["function"]["name"] for tool in prompt.tools}
        for call in prompt.calls:
            assert call["name"] in names
    calls = [len(prompt.calls) for prompt in prompts if prompt.task == "tool-parallel"]
    assert calls == [2] * 50
    assert all(p.messages[-1]["role"] == "tool" for p in prompts if p.task == "tool-result")


def test_scoring() -> None:
    answer = Prompt("a", [], "42")
    assert is_correct(answer, " 42\n")
    assert not is_correct(answer, "42.")
    prompts = [Prompt("a", [], "1"), Prompt("a", [], "2"), Prompt("b", [], "3")]
    scores = accuracy_by_task(prompts, ["1", "x", "3"])
    assert [(task, score.accuracy) for task, score in scores.items()] == [("a", 0.5), ("b", 1.0)]
    assert "| a | 1 | 2 | 50.0% |" in accuracy_table(scores)


_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (_CALL, True),
        (_CALL.replace(" ", ""), True),
        (f"{_CALL}\n{_CALL}", False),
        (f"Here: {_CALL}", False),
        (_CALL.replace("1", "2"), False),
        (_CALL.replace("}}", "}"), False),
        ("", False),
    ],
)
def test_scoring_of_calls(text: str, right: bool) -> None:
    prompt = Prompt("t", [], "", calls=[{"name": "f", "arguments": {"x": 1}}])
    assert is_correct(prompt, text) == right
