"""Adds grammars of tool calls to the function that checks the grammars of requests."""

import msgspec

from minisgl.message.messages import CompileGrammar, TokenizeResult
from minisgl.tokenizer import Vocabulary
from minisgl.tokenizer.worker import CheckGrammar
from minisgl.tool_calls.formats import FORMATS
from minisgl.tool_calls.grammar import ToolGrammar


def with_tool_grammars(vocabulary: Vocabulary, check: CheckGrammar) -> CheckGrammar:
    """Return a function that writes the grammar of a ToolGrammar before `check` compiles it."""
    markers = {text for format in FORMATS.values() for text in format.markers}
    token_ids = vocabulary.single_tokens(markers)

    def check_all(request: CompileGrammar) -> TokenizeResult:
        if request.kind != "tool_calls":
            return check(request)
        wanted = msgspec.json.decode(request.text, type=ToolGrammar)
        written = FORMATS[wanted.format].written(wanted, token_ids)
        parts = {"lark": written.lark, "schemas": written.schemas}
        text = msgspec.json.encode(parts).decode()
        result = check(msgspec.structs.replace(request, text=text))
        return msgspec.structs.replace(result, trigger=written.trigger)

    return check_all
