"""Mistral's calls, by the version of the model's tokenizer:

before 11    [TOOL_CALLS][{"name": "f", "arguments": {...}}]
11           [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}
after 11     [TOOL_CALLS]f[ARGS]{...}
"""

import re
from collections.abc import Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats.json_calls import json_call, read_json_calls
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[{]*")
_ID_CHARS = 9  # The templates refuse ids of another length.


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.literal("[")):
        yield from read_json_calls(reader, calls, separator=",")
        yield from reader.expect("]")
        reader.commit()
        return
    name = yield from reader.run(_NAME)
    if (yield from reader.literal(_ID)):
        yield from reader.run(_NAME)
    yield from reader.literal(_ARGUMENTS)
    yield from reader.space()
    if (yield from reader.char()) != "{":
        raise NotACall
    calls.start(name)
    yield from reader.json_value(calls.arguments)
    calls.end()


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    return f"{writer.text(name)} {writer.text(_ARGUMENTS)} {writer.schema(schema)}"


MISTRAL = Format(
    name="mistral",
    probe=_START,
    starts=(_START,),
    markers=(_START, _ID, _ARGUMENTS),
    read=_read,
    call=json_call("arguments"),
    opening="[",
    separator=", ",
    end="]",
    id_chars=_ID_CHARS,
)
MISTRAL_V11 = MISTRAL._replace(
    name="mistral-v11", probe=_ARGUMENTS, call=_write_call, opening="", separator="", end=""
)
