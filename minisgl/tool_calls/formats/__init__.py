"""The formats of tool calls. Each format is a module."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from minisgl.message.messages import ToolOptions
from minisgl.tokenizer import Vocabulary
from minisgl.tokenizer.detokenizer import CallParser
from minisgl.tool_calls.formats.harmony import HARMONY
from minisgl.tool_calls.formats.hermes import HERMES
from minisgl.tool_calls.formats.llama3 import LLAMA3
from minisgl.tool_calls.formats.mistral import MISTRAL, MISTRAL_V11
from minisgl.tool_calls.formats.pythonic import PYTHONIC
from minisgl.tool_calls.formats.qwen3_coder import QWEN3_CODER
from minisgl.tool_calls.parser import Format

# In the order in which `detect` tries them.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        format.name: format
        for format in (HARMONY, HERMES, QWEN3_CODER, MISTRAL_V11, MISTRAL, LLAMA3, PYTHONIC)
    }
)

__all__ = ["FORMATS", "ToolCallParsers"]


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
