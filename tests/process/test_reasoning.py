"""Reasoning is separated from the answer: a real engine with a model that recites both."""

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.process.agents import answer_of
from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_reciting_model

pytestmark = pytest.mark.process

# The model's output after the last line break of the prompt, token by token.
RECITAL = ["Ċ", "<think>", "Ġword", "Ġcode", "</think>", "Ġletter", "Ġlocker", "<|im_end|>"]
REASONING, ANSWER = " word code", " letter locker"
TEMPLATE = """
{%- if reasoning_effort %}effort: {{ reasoning_effort }}{% endif -%}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor -%}
{%- if thinking %}<think>{% endif -%}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("reciting") / "tiny"
    folder.mkdir()
    build_reciting_model(folder, RECITAL, ["<think>", "</think>"])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with run_server("--model", str(folder), "--num-pages", "64") as found:
        yield found.wait_ready()


CASES: list[tuple[dict[str, Any], str | None, str, int]] = [
    ({}, REASONING, ANSWER, 7),
    ({"chat_template_kwargs": {"thinking": True}}, REASONING, ANSWER, 6),
    ({"chat_template_kwargs": {"enable_thinking": False}}, None, ANSWER, 3),
    ({"separate_reasoning": False}, None, f"<think>{REASONING}</think>{ANSWER}", 7),
    ({"max_tokens": 2}, " word", "", 2),
]


@pytest.mark.parametrize(("more", "reasoning", "content", "tokens"), CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content(
    server: ServerProcess,
    stream: bool,
    more: dict[str, Any],
    reasoning: str | None,
    content: str,
    tokens: int,
) -> None:
    client = server.client()
    call: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    if stream:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**call, **asked, extra_body=more))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        parts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
        found = "".join(part or "" for part in parts) or None
        text = "".join(delta.content or "" for delta in deltas)
        first_text = next((i for i, delta in enumerate(deltas) if delta.content), len(deltas))
        assert not any(parts[first_text:]), "all reasoning comes before the answer"
        usage = chunks[-1].usage
    else:
        whole = client.chat.completions.create(**call, extra_body=more)
        message = whole.choices[0].message
        found, text = (message.model_extra or {}).get("reasoning_content"), message.content
        usage = whole.usage
    assert (found, text) == (reasoning, content)
    assert usage is not None
    assert usage.completion_tokens == tokens
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len((reasoning or "").split())


def test_reasoning_effort_reaches_the_template_from_chat_and_responses(
    server: ServerProcess,
) -> None:
    client = server.client()
    chat: Any = [{"role": "user", "content": "hi"}]
    create = client.chat.completions.create
    plain = create(model="tiny", messages=chat).usage
    more = create(model="tiny", messages=chat, reasoning_effort="high").usage
    same = client.responses.create(model="tiny", input="hi", reasoning={"effort": "high"}).usage
    assert plain is not None
    assert more is not None
    assert same is not None
    assert plain.prompt_tokens < more.prompt_tokens == same.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_items_of_responses(server: ServerProcess, stream: bool) -> None:
    response = answer_of(server.client().responses, stream, model="tiny", input="hi")
    reasoning, message = response.output
    assert reasoning.content[0].text == REASONING
    assert message.content[0].text == response.output_text == ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks_of_messages(server: ServerProcess, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given: Any = {
        "model": "tiny",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "hi"}],
    }

    def ask(**more: Any) -> list[tuple[str, str]]:
        blocks = answer_of(client.messages, stream, **given, **more).content
        return [(b.type, b.thinking if b.type == "thinking" else b.text) for b in blocks]

    thinking = {"type": "adaptive"}
    assert ask(thinking=thinking) == [("thinking", REASONING), ("text", ANSWER)]
    assert ask(thinking={"type": "disabled"}) == [("text", ANSWER)]


@pytest.mark.parametrize(
    ("options", "reasoning"),
    [({}, REASONING), ({"thinking": True}, REASONING), ({"enable_thinking": False}, None)],
)
def test_grammar_begins_after_the_thinking(
    server: ServerProcess, options: dict[str, bool], reasoning: str | None
) -> None:
    more = {"chat_template_kwargs": options, "regex": " (letter|word) [a-z]+"}
    (choice,) = (
        server.client()
        .chat.completions.create(
            model="tiny",
            temperature=0,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            extra_body=more,
        )
        .choices
    )
    message = choice.message
    assert (message.model_extra or {}).get("reasoning_content") == reasoning
    assert message.content is not None
    assert re.match(" letter ?" if reasoning else " (letter|word)", message.content)
