"""MiniMax-M2: <minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>...

A value is raw text. The tool's schema gives the JSON type of the value.
"""

import re
from collections.abc import Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.raw_values import RawValues
from minisgl.tool_calls.reader import Reader, Steps

_START, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME = re.compile(r"[^\s\"<>]*")
_VALUES = RawValues(
    _PARAMETER, '">', _PARAMETER_END, "\n", follows=(_PARAMETER, _INVOKE_END), in_lines=False
)


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.expect(_INVOKE)
    yield from _VALUES.read_call(reader, calls, _NAME, _INVOKE_END)
    while (yield from reader.token(_INVOKE)):
        yield from _VALUES.read_call(reader, calls, _NAME, _INVOKE_END)
    if (yield from reader.token(_END)):
        reader.commit()


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    head, tail = writer.text(f'{_INVOKE}{name}">\n'), writer.text(_INVOKE_END)
    return " ".join([head, *_VALUES.write(writer, name, schema), tail])


MINIMAX = Format(
    name="minimax",
    probe=_START,
    starts=(_START,),
    markers=(_START, _END),
    read=_read,
    call=_write_call,
    opening="\n",
    separator="\n",
    end=f"\n{_END}",
)
