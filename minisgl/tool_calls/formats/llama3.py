"""Llama 3.1 to 3.3: {"name": "f", "parameters": {...}} as the whole answer or after a tag.

Several calls are separated by semicolons.
"""

from minisgl.tool_calls.formats.json_calls import read_json_call
from minisgl.tool_calls.grammar import CallGrammar, json_call
from minisgl.tool_calls.parser import Calls, Format
from minisgl.tool_calls.reader import Reader, Steps

_TAG = "<|python_tag|>"


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.space()
    yield from read_json_call(reader, calls)
    while True:
        yield from reader.space()
        if not (yield from reader.literal(";")):
            return
        yield from reader.space()
        yield from read_json_call(reader, calls)


LLAMA3 = Format(
    name="llama3",
    starts=(_TAG,),
    markers=(_TAG,),
    read=_read,
    probe='"parameters"',
    grammar=CallGrammar(call=json_call("parameters"), separator="; "),
    bare="{",
)
