"""The formats of tool calls, and their use in the detokenizer and in a tokenizer process."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from minisgl.core import InvalidRequest
from minisgl.message.messages import CompileGrammar, TokenizeResult, ToolOptions
from minisgl.tokenizer import Vocabulary
from minisgl.tokenizer.detokenizer import CallParser
from minisgl.tokenizer.worker import CheckGrammar
from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats.harmony import HARMONY, Harmony
from minisgl.tool_calls.formats.json_calls import HERMES, LLAMA3, MISTRAL, MISTRAL_V11
from minisgl.tool_calls.formats.pythonic import PYTHONIC
from minisgl.tool_calls.formats.qwen3_coder import QWEN3_CODER
from minisgl.tool_calls.grammar import ToolGrammar

__all__ = ["FORMATS", "ToolCallParsers", "with_tool_grammars"]

# In the order in which `detect` tries them.
_ALL: tuple[Format | Harmony, ...] = (
    HARMONY,
    HERMES,
    QWEN3_CODER,
    MISTRAL_V11,
    MISTRAL,
    LLAMA3,
    PYTHONIC,
)
FORMATS: Mapping[str, Format | Harmony] = MappingProxyType({one.name: one for one in _ALL})


class ToolCallParsers:
    """Makes the parsers of requests. It knows the special tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._marker_ids = {
            format.name: vocabulary.special_ids(format.markers) for format in FORMATS.values()
        }

    def __call__(self, options: ToolOptions) -> CallParser:
        """Return the parser of one answer."""
        parameters = msgspec.json.decode(options.parameters_json, type=dict)
        return FORMATS[options.format].open(parameters, self._marker_ids[options.format])


def with_tool_grammars(vocabulary: Vocabulary, check: CheckGrammar) -> CheckGrammar:
    """Return a function that writes the grammar of a ToolGrammar before `check` compiles it."""
    markers = {text for format in FORMATS.values() for text in format.markers}
    token_ids = vocabulary.single_tokens(markers)

    def check_all(request: CompileGrammar) -> TokenizeResult:
        if request.kind != "tool_calls":
            return check(request)
        wanted = msgspec.json.decode(request.text, type=ToolGrammar)
        try:
            written = FORMATS[wanted.format].write(wanted, token_ids)
        except InvalidRequest as error:
            return TokenizeResult(uid=request.uid, error=error.message)
        text = msgspec.json.encode(written).decode()
        result = check(msgspec.structs.replace(request, text=text))
        return msgspec.structs.replace(result, trigger=written.trigger)

    return check_all
