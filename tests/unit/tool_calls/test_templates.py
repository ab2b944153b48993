"""The oracle of the parsers: a chat template renders a random call, and the parser reads it back.

`templates` holds one short template per format, which writes calls as the models of the family do.
tests/data/templates holds templates that model authors published. The folder in the variable
TOOL_TEMPLATES may hold further *.jinja files; a file without a known format is skipped.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from minisgl.request.chat import harmony_chat
from minisgl.tokenizer.renderer import TemplateError
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tool_calls.detect import answer_in, detect
from minisgl.tool_calls.formats import FORMATS
from tests.examples import examples
from tests.unit.tool_calls.answers import TEMPLATES, cut, load_template, parse

OWN = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
PUBLISHED = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-v11",
    "openai-gpt-oss-20b": "harmony",
    "google-gemma-4": "gemma4",
    "meta-models-Muse-Glimmer-30B": "atem",
}
DATA = Path(__file__).parents[2] / "data" / "templates"
GIVEN = {path.stem: path for path in sorted(Path(os.environ.get("TOOL_TEMPLATES", "-")).glob("*"))}
PATHS = {**OWN, **{name: DATA / f"{name}.jinja" for name in PUBLISHED}, **GIVEN}
QUESTION = {"role": "user", "content": "question"}

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,20}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=30)
scalars = texts | st.integers(-(10**12), 10**12) | st.booleans() | st.none()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)
TAGS = re.compile(r"<[^<>]*>")  # the ends of the turn, and an empty block of thinking
TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", list: "array"}


@cache
def template_of(name: str) -> tuple[ChatTemplate, str]:
    template = load_template(PATHS[name])
    return template, detect(template.render)


def tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A tool whose schema has the types of these arguments."""
    properties = {
        key: {"type": TYPES.get(type(value), "object"), "description": key}
        for key, value in arguments.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": "does it", "parameters": schema}
    return {"type": "function", "function": function}


def answer_of(
    template: ChatTemplate, calls: list[tuple[str, Any]], format_name: str
) -> tuple[str, dict[str, Any]]:
    """The text with which the model would make these calls, and the schemas of the tools.

    The template of gpt-oss renders one call of a message, so the server divides the message.
    """
    tools = [tool(name, arguments) for name, arguments in calls]
    tool_calls = [
        {"id": f"abcdefg{i:02}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    call = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    chat = [QUESTION, call]
    if format_name == "harmony":
        chat = harmony_chat(chat)
    options = {"tools": tools, "enable_thinking": False}
    prompt = template.render([QUESTION], options)
    try:
        text = template.render(chat, {**options, "add_generation_prompt": False})
    except TemplateError as error:
        assume("single tool-calls" not in str(error))  # Llama 3 renders one call only.
        raise
    answer = answer_in(text, prompt)
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    return answer, schemas


def is_exact(format_name: str, template: str, value: Any) -> bool:
    """False for a value that the format, or this template, does not write without ambiguity."""
    if isinstance(value, dict):
        return all(is_exact(format_name, template, v) for v in value.values())
    if isinstance(value, list):
        return all(is_exact(format_name, template, v) for v in value)
    if format_name == "atem" and isinstance(value, str):
        return "</atem:parameter>" not in value
    if format_name in ("minimax", "qwen3-coder") and isinstance(value, str):
        return "</parameter>" not in value
    if format_name == "glm" and isinstance(value, str):
        return "</arg_value>" not in value
    if format_name == "gemma4" and isinstance(value, str):
        return '<|"|>' not in value
    if format_name == "pythonic" and isinstance(value, str) and template not in OWN:
        return not set("'\"\\") & set(value)  # LFM2's template does not escape them.
    return True


def test_every_format_has_a_template_from_which_it_is_detected() -> None:
    assert {name: template_of(name)[1] for name in OWN} == {name: name for name in FORMATS}


def test_the_formats_of_published_templates_are_detected() -> None:
    assert {path.stem for path in DATA.glob("*.jinja")} == set(PUBLISHED)
    assert {name: template_of(name)[1] for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=examples(45), suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_a_rendered_call_is_read_back(name: str, data: st.DataObject) -> None:
    template, format_name = template_of(name)
    if format_name not in FORMATS:
        pytest.skip(f"the format of this template is {format_name}")
    arguments = st.dictionaries(names, values, max_size=3)
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
    calls = list(dict(calls).items())  # One schema for each name.
    assume(all(is_exact(format_name, name, arguments) for _, arguments in calls))
    answer, schemas = answer_of(template, calls, format_name)
    whole = parse(format_name, [answer], schemas)
    assert whole.calls == calls
    assert whole.failures == 0
    assert not TAGS.sub("", whole.content).strip()
    pieces = parse(format_name, cut(answer, data.draw(st.lists(st.integers(0, 400)))), schemas)
    assert (pieces.content, pieces.names, pieces.arguments) == (
        whole.content,
        whole.names,
        whole.arguments,
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "none"),
        ("{{ raise_exception('no') }}", "none"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}", "unknown"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content + '' }}{% endfor %}", "unknown"),
        (
            "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls[0].x.y }}{% endfor %}",
            "none",
        ),
    ],
)
def test_a_template_without_a_known_format_is_reported(template: str, expected: str) -> None:
    chat_template = ChatTemplate(template, {}, 1e9)
    assert detect(chat_template.render) == expected
