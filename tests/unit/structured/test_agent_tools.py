"""Calls of the tools that agents send are within the limits of work.

agent_tools.json has the parameters of the tools of Codex CLI, Claude Code, opencode and qwen-code
in the form of their published definitions, without descriptions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLTokenizer

from minisgl.core import Grammar
from minisgl.demo import model_path
from minisgl.message.messages import CompileGrammar
from minisgl.structured.library import compile_grammar
from minisgl.structured.source import GrammarCompiler
from minisgl.structured.whitespace import whitespace_pattern
from minisgl.tool_calls.formats import FORMATS, WrittenGrammar
from minisgl.tool_calls.grammar import ToolGrammar

AGENTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("agent_tools.json").read_text(encoding="utf-8")
)


MARKERS = ("<tool_call>", "</tool_call>")
TOKENIZER = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
FORMAT = "hermes"


def write(text: str) -> WrittenGrammar:
    token_ids = {marker: TOKENIZER.token_to_id(marker) for marker in MARKERS}
    return FORMATS[FORMAT].write(msgspec.json.decode(text, type=ToolGrammar), token_ids)


def value_of(schema: dict[str, Any]) -> Any:
    """A value with all properties of a schema."""
    match schema.get("type"):
        case "object":
            return {name: value_of(part) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [value_of(schema["items"])] * 2
        case "boolean":
            return True
        case "number":
            return 120
    if "enum" in schema:
        return schema["enum"][-1]
    return "https://localhost/a" if schema.get("format") == "uri" else "some text of a value, 12"


@pytest.mark.parametrize("agent", AGENTS)
def test_each_call_of_an_agent_is_accepted(agent: str, tokenizer: LLTokenizer) -> None:
    tools = AGENTS[agent]
    wanted = {"format": FORMAT, "must_call": True, "parallel": True, "tools": [*tools.items()]}
    request = CompileGrammar(
        kind="tool_calls", text=json.dumps(wanted), whitespace_pattern=whitespace_pattern(8)
    )
    source = GrammarCompiler(tokenizer, write).check(request).source
    lost = []
    for name, schema in tools.items():
        call = {"name": name, "arguments": value_of(schema)}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        matcher = compile_grammar(tokenizer, Grammar(source=source, kind="tool_calls"))
        for token in tokenizer.tokenize_str(text):
            mask = matcher.compute_bitmask()
            if matcher.is_error() or not mask[token >> 3] & (1 << (token & 7)):
                lost.append((name, matcher.get_error()))
                break
            matcher.consume_token(token)
    sys.stdout.write(f"{agent}: {len(tools) - len(lost)} of {len(tools)} tools accepted\n")
    assert not lost
