"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call> per call."""

from minisgl.tool_calls.formats.json_calls import read_json_call
from minisgl.tool_calls.grammar import CallGrammar, json_call
from minisgl.tool_calls.parser import Calls, Format
from minisgl.tool_calls.reader import Reader, Steps

_START, _END = "<tool_call>", "</tool_call>"


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.space()
    yield from read_json_call(reader, calls)
    yield from reader.space()
    if (yield from reader.literal(_END)):
        reader.commit()


HERMES = Format(
    name="hermes",
    starts=(_START,),
    markers=(_START, _END),
    read=_read,
    probe=_END,
    grammar=CallGrammar(
        start=_START,
        call=json_call("arguments", before="\n", after="\n"),
        separator="\n",
        end=_END,
    ),
)
