"""The formats of tool calls, one module each."""

from collections.abc import Mapping
from types import MappingProxyType

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
        for format in (HERMES, QWEN3_CODER, MISTRAL_V11, MISTRAL, LLAMA3, PYTHONIC)
    }
)

__all__ = ["FORMATS"]
