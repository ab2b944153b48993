"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, repeated."""

from minisgl.tool_calls.formats.json_calls import read_json_call
from minisgl.tool_calls.parser import Calls, Format
from minisgl.tool_calls.reader import Reader, Steps

_END = "</tool_call>"


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.space()
    yield from read_json_call(reader, calls)
    yield from reader.space()
    if (yield from reader.literal(_END)):
        reader.commit()


HERMES = Format(
    name="hermes", starts=("<tool_call>",), markers=("<tool_call>", _END), read=_read, probe=_END
)
