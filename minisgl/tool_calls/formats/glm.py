"""GLM-4.5 and later: <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>.

A value is raw text. The tool's schema gives the JSON type of the value. Line breaks between the
tags are optional.
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
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{]*")  # without a brace, which begins the JSON of other formats
_VALUES = RawValues(
    _KEY, f"{_KEY_END}\n{_VALUE}", _VALUE_END, "\n", follows=(_KEY, _END), in_lines=False
)


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.space()
    yield from _VALUES.read_call(reader, calls, _NAME, "", _END)


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    return " ".join([writer.text(f"{name}\n"), *_VALUES.write(writer, name, schema)])


GLM = Format(
    name="glm",
    probe=_KEY,
    starts=(_START,),
    markers=(_START, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    read=_read,
    call=_write_call,
    separator="\n",
    end=_END,
)
