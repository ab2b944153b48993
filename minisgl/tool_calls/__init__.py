"""Tool calls: the call formats of model families, their parsers, and the detection of a format.

The detokenizer feeds the text of each answer to a `ToolCallParser`. A tokenizer process finds the
format of the model. server/worker_main.py passes both in; the core does not import this package.
"""

from minisgl.tool_calls.detect import detect_format
from minisgl.tool_calls.formats import FORMATS, ToolCallParsers
from minisgl.tool_calls.grammar import ToolGrammar
from minisgl.tool_calls.grammar_service import with_tool_grammars
from minisgl.tool_calls.parser import ToolCallParser

__all__ = [
    "FORMATS",
    "ToolCallParser",
    "ToolCallParsers",
    "ToolGrammar",
    "detect_format",
    "with_tool_grammars",
]
