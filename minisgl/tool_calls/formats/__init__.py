"""The formats of tool calls, and their use in the detokenizer and in the process for grammars."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from minisgl.message.messages import ToolOptions
from minisgl.tokenizer.request_text import CallParser
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats.atem import ATEM
from minisgl.tool_calls.formats.gemma4 import GEMMA4
from minisgl.tool_calls.formats.glm import GLM
from minisgl.tool_calls.formats.harmony import HARMONY
from minisgl.tool_calls.formats.json_calls import HERMES, LLAMA3, MISTRAL, MISTRAL_V11
from minisgl.tool_calls.formats.message_format import MessageFormat
from minisgl.tool_calls.formats.minimax import MINIMAX
from minisgl.tool_calls.formats.pythonic import PYTHONIC
from minisgl.tool_calls.formats.qwen3_coder import QWEN3_CODER
from minisgl.tool_calls.grammar import ToolGrammar, WrittenGrammar

__all__ = ["FORMATS", "ToolCallParsers", "ToolGrammarWriter"]

# In the order in which `detect` tries them.
_ALL: tuple[Format | MessageFormat, ...] = (
    HARMONY,
    ATEM,
    HERMES,
    QWEN3_CODER,
    GLM,
    MINIMAX,
    GEMMA4,
    MISTRAL_V11,
    MISTRAL,
    LLAMA3,
    PYTHONIC,
)
FORMATS: Mapping[str, Format | MessageFormat] = MappingProxyType({one.name: one for one in _ALL})


class ToolCallParsers:
    """Makes the parsers of requests. It knows the special tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._marker_ids = {
            format.name: vocabulary.special_ids(format.markers) for format in FORMATS.values()
        }

    def __call__(self, options: ToolOptions) -> CallParser:
        """Return the parser of one answer."""
        return FORMATS[options.format].open(options.parameters, self._marker_ids[options.format])


class ToolGrammarWriter:
    """Writes the grammars of answers with tool calls, with the markers of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        markers = {text for format in FORMATS.values() for text in format.markers}
        self._token_ids = vocabulary.single_tokens(markers)

    def __call__(self, text: str) -> WrittenGrammar:
        """Return the grammar of a ToolGrammar. text: its JSON. Raises InvalidRequest."""
        wanted = msgspec.json.decode(text, type=ToolGrammar)
        return FORMATS[wanted.format].write(wanted, self._token_ids)
