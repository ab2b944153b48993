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
from minisgl.tool_calls.reader import NotACall, Reader, Steps

_START, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME = re.compile(r"[^\s\"<>]*")
_KEY = re.compile(r"[^\n\">]*")
_VALUES = RawValues(
    _PARAMETER, '">', _PARAMETER_END, "\n", follows=(_PARAMETER, _INVOKE_END), in_lines=False
)


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.expect(_INVOKE)
    yield from _read_call(reader, calls)
    while (yield from reader.token(_INVOKE)):
        yield from _read_call(reader, calls)
    if (yield from reader.token(_END)):
        reader.commit()


def _read_call(reader: Reader, calls: Calls) -> Steps[None]:
    """Read a call after its first tag up to its last one, which may be missing."""
    name = yield from reader.run(_NAME)
    if not (yield from reader.literal('">')):
        raise NotACall
    has_parameter = yield from reader.token(_PARAMETER)
    if not has_parameter:
        yield from reader.expect(_INVOKE_END)
    calls.start(name)
    types = calls.parameters.get(name, {})
    while has_parameter:
        key = yield from reader.run(_KEY)
        yield from reader.expect('">')
        calls.argument(key)
        yield from _VALUES.read(reader, calls, frozenset(types.get(key, ())))
        has_parameter = yield from reader.literal(_PARAMETER)
    calls.end()
    yield from reader.literal(_INVOKE_END)
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
