"""Formats whose calls are JSON objects with the name and the arguments.

hermes  <tool_call>{"name": "f", "arguments": {...}}</tool_call> per call, also Qwen2.5 and Qwen3
llama3  {"name": "f", "parameters": {...}} as the whole answer or after a tag, Llama 3.1 to 3.3

Several calls of llama3 are separated by semicolons.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps

_START, _END = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"
# The key of the arguments. Hermes and Mistral write "arguments", Llama 3 writes "parameters".
_ARGUMENTS = ("arguments", "parameters")


def read_json_calls(reader: Reader, calls: Calls, separator: str = "") -> Steps[None]:
    """Read one call, or with a separator several calls, and the white space around them."""
    while True:
        yield from reader.space()
        yield from _read_call(reader, calls)
        yield from reader.space()
        if not separator or not (yield from reader.literal(separator)):
            return


def json_call(key: str, around: str = "") -> Callable[[GrammarWriter, str, Mapping[str, Any]], str]:
    """Return `call` of Format for {"name": ..., key: {...}} between two equal texts."""

    def write(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
        head = writer.text(f'{around}{{"name": {json.dumps(name)}, "{key}": ')
        return f"{head} {writer.schema(schema)} {writer.text('}' + around)}"

    return write


def _read_call(reader: Reader, calls: Calls) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}} in any order of the keys; other keys are dropped.

    The arguments are passed on as they are written. Arguments before the name are withheld until
    the name is known.
    """
    name = None
    early: list[str] = []
    has_arguments = False
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from reader.json_text()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and name is None:
            name = yield from reader.json_text()
            if has_arguments:
                calls.start(name)
                calls.arguments("".join(early))
        elif key in _ARGUMENTS and not has_arguments:
            if (yield from reader.char()) != "{":
                raise NotACall
            has_arguments = True
            if name is not None:
                calls.start(name)
            yield from reader.json_value(early.append if name is None else calls.arguments)
        else:
            yield from reader.json_value(_drop)
        yield from reader.space()
        if (yield from reader.literal("}")):
            break
        yield from reader.expect(",")
    if name is None or not has_arguments:
        calls.start(name or "")
    calls.end()


def _drop(piece: str) -> None:
    pass


def _read_hermes(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from read_json_calls(reader, calls)
    if (yield from reader.literal(_END)):
        reader.commit()


def _read_llama3(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from read_json_calls(reader, calls, separator=";")


HERMES = Format(
    name="hermes",
    probe=_END,
    starts=(_START,),
    markers=(_START, _END),
    read=_read_hermes,
    call=json_call("arguments", around="\n"),
    separator="\n",
    end=_END,
)
LLAMA3 = Format(
    name="llama3",
    probe='"parameters"',
    starts=(_TAG,),
    markers=(_TAG,),
    bare="{",
    read=_read_llama3,
    call=json_call("parameters"),
    separator="; ",
)
