"""ATEM (Muse Glimmer): recipients divide an answer, and grammars constrain its calls."""

import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from minisgl.demo import model_path
from minisgl.request.chat import atem_chat
from minisgl.structured.library import load_tokenizer
from minisgl.tool_calls.formats import FORMATS
from minisgl.tool_calls.formats.atem import MARKERS
from minisgl.tool_calls.grammar import ToolGrammar
from minisgl.tool_calls.schema import parameter_types
from tests.unit.tool_calls.answers import load_template
from tests.unit.tool_calls.test_grammar import EOS, SCHEMAS, accepts

PUBLISHED = Path(__file__).parents[2] / "data" / "templates" / "meta-models-Muse-Glimmer-30B.jinja"
TOOLS = {
    name: {"type": "object", "properties": {"a": {"type": kind}, "b": {"type": "string"}}}
    for name, kind in (("f", "integer"), ("g", "array"))
}
NEXT = "<|eom|><|start|>assistant"
THOUGHT = f" to=self<|message|>Hm <|eot |>{NEXT}"
CALL = (
    ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
    '<atem:parameter name="a">1</atem:parameter>\n'
    '<atem:parameter name="b"> x\n</b></atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)


def divided(answer: str, tools: dict[str, Any], cut: int = 0) -> tuple[str, str, list[list[str]]]:
    """The reasoning, the content and the calls of an answer. cut: where text arrives in two."""
    parser = FORMATS["atem"].open(parameter_types(tools), {})
    reasoning, content = "", ""
    calls: list[list[str]] = []
    pieces = re.split(f"({'|'.join(map(re.escape, MARKERS))})", answer)
    for piece in [*pieces, None]:
        for part in (piece,) if piece in (*MARKERS, None) else (piece[:cut], piece[cut:]):
            thinks = parser.in_reasoning
            if part is None:
                parser.finish()
            else:
                parser.feed(part, part in MARKERS)
            text, deltas = parser.take()
            reasoning, content = reasoning + text * thinks, content + text * (not thinks)
            for delta in deltas:
                if delta.id:
                    calls.append([delta.name, ""])
                calls[-1][1] += delta.arguments
    assert parser.failures == 0
    return reasoning, content, calls


@pytest.mark.parametrize("cut", [0, 1, 5, 23])
def test_recipients_become_reasoning_content_and_calls(cut: int) -> None:
    called = ["f", '{"a": 1, "b": " x\\n</b>"}']
    look = f" to=user<|message|>I look.{NEXT}"
    answer = THOUGHT + look + CALL + NEXT + CALL + "<|eot|>"
    assert divided(answer, TOOLS, cut) == ("Hm <|eot |>", "I look.", [called, called])
    assert divided("Hello", TOOLS, cut) == ("", "Hello", [])
    assert divided(" to=user<|message|>Hi<|eot|>", {}, cut) == ("", "Hi", [])
    # Without tools, a message to a function is content.
    assert divided(CALL, {}, cut)[1:] == (CALL.partition("<|message|>")[2], [])


def test_the_published_template_renders_an_answer_as_the_model_wrote_it() -> None:
    call = {"id": "1", "function": {"name": "g", "arguments": {"a": [1, "x"], "b": "y"}}}
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    tools = [
        {"function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    chat = [{"role": "user", "content": "hi"}, {**message, "tool_calls": [call, call]}]
    template, options = load_template(PUBLISHED), {"tools": tools, "reasoning_strength": "low"}
    prompt = template.render(chat[:1], options)
    assert "Reasoning strength: low." in prompt
    text = template.render(atem_chat(chat), {**options, "add_generation_prompt": False})
    assert text.startswith(prompt)
    called = ["g", '{"a": [1, "x"], "b": "y"}']
    assert divided(text.removeprefix(prompt), TOOLS) == ("Hm.", "I look.", [called, called])


def test_grammars_constrain_calls_and_messages_to_the_user(tmp_path: Path) -> None:
    vocabulary = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    vocabulary.add_special_tokens(list(MARKERS))
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path), (EOS,))
    ids = {marker: vocabulary.token_to_id(marker) for marker in MARKERS}
    call = CALL[: CALL.index("<atem:parameter")].replace("f", "now", 1).replace('"f"', '"now"')
    call += "</atem:invoke>\n</atem:function_calls>"

    def accepted(text: str, **request: Any) -> bool:
        values = {"tools": list(SCHEMAS.items()), "must_call": True, "parallel": True, **request}
        written = FORMATS["atem"].write(ToolGrammar(format="atem", **values), ids)
        return accepts(tokenizer, written, vocabulary.encode(text, add_special_tokens=False).ids)

    assert accepted(call)
    assert accepted(THOUGHT + call)
    assert accepted(call + NEXT + THOUGHT + call)
    assert not accepted(call + NEXT + call, parallel=False)
    assert not accepted(call.replace("now", "never"))
    assert not accepted(" to=user<|message|>no")
    assert accepted(THOUGHT + " to=user<|message|>no", must_call=False)
    answer = {"type": "object", "properties": {}, "additionalProperties": False}
    assert accepted(" to=user<|message|>{}", must_call=False, tools=[], answer=answer)
    assert not accepted(" to=user<|message|>no", must_call=False, tools=[], answer=answer)
