"""Qwen3-Coder, Qwen3.5 and later: <tool_call><function=f><parameter=k>v</parameter>...

A value is raw text between two newlines. The tool's schema gives the JSON type of the value.
"""

import re
from collections.abc import Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.raw_values import RawValues
from minisgl.tool_calls.reader import Reader, Steps

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")
_VALUES = RawValues(
    _PARAMETER, ">", _PARAMETER_END, "\n", follows=(_PARAMETER, _FUNCTION_END), in_lines=True
)


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    if start == _START:
        yield from reader.expect(_FUNCTION)
    yield from _VALUES.read_call(reader, calls, _NAME, ">", _FUNCTION_END)
    if (yield from reader.token(_END)):
        reader.commit()


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    head, tail = writer.text(f"\n{_FUNCTION}{name}>\n"), writer.text(f"{_FUNCTION_END}\n")
    return " ".join([head, *_VALUES.write(writer, name, schema), tail])


QWEN3_CODER = Format(
    name="qwen3-coder",
    probe=_FUNCTION,
    starts=(_START, _FUNCTION),
    markers=(_START, _END),
    read=_read,
    call=_write_call,
    separator="\n",
    end=_END,
)
