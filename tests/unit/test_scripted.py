"""`minisgl scripted`: the model that agents are tried on makes real calls of their shell tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.__main__ import main
from minisgl.core import ConfigError, SamplingParams
from minisgl.llm import LLM
from minisgl.scripted import DONE, SHELLS, write_model
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tool_calls.detect import detect
from tests.unit.tool_calls.answers import SPECIAL_TOKENS

TASK = {"role": "user", "content": "Write hello to a file."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scripted") / "model"
    assert main(["scripted", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def template(folder: Path) -> ChatTemplate:
    text = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return ChatTemplate(text, SPECIAL_TOKENS, 1e9)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def prompt(template: ChatTemplate, messages: list[Any], *tools: str) -> str:
    options = {"tools": [tool(name) for name in tools] or None, "add_generation_prompt": True}
    return template.render(messages, options)


def test_the_model_calls_the_shell_tool_of_each_agent(folder: Path, template: ChatTemplate) -> None:
    """The engine computes the scripted weights, also at a high temperature."""
    prompts = [prompt(template, [TASK], "read", name, "write") for name in SHELLS]
    with LLM(str(folder), device="cpu") as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=1.5, max_tokens=200))
    for answer, (name, arguments) in zip(answers, SHELLS.items(), strict=True):
        _, _, call = answer.text.partition("<tool_call>\n")
        found = json.loads(call.partition("\n</tool_call>")[0])
        assert found == {"name": name, "arguments": arguments}
        assert answer.finish_reason == "stop"


def test_the_turn_ends_after_the_result_and_the_next_turn_calls_again(
    folder: Path, template: ChatTemplate
) -> None:
    function = {"name": "bash", "arguments": SHELLS["bash"]}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    # Claude Code sends texts of its own after the result.
    round_ = [
        TASK,
        call,
        {"role": "tool", "content": "ok"},
        {"role": "user", "content": "reminder"},
    ]
    ended = [*round_, {"role": "assistant", "content": DONE}, TASK]
    prompts = [prompt(template, chat, "bash") for chat in (round_, ended, [TASK])]
    prompts.append(prompt(template, [TASK], "read"))
    with LLM(str(folder), device="cpu") as llm:
        texts = [one.text for one in llm.generate(prompts, SamplingParams(max_tokens=200))]
    assert texts[0] == DONE
    assert "<tool_call>" in texts[1]
    assert texts[1] == texts[2]
    assert "only calls a shell tool" in texts[3]


def test_the_format_of_the_calls_is_known(template: ChatTemplate) -> None:
    assert detect(template.render) == "hermes"


def test_an_existing_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give a new folder"):
        write_model(folder)
