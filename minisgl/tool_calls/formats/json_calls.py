"""Formats whose arguments are one JSON object, mostly beside the name in another object.

hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call> per call, as Qwen2.5 and Qwen3
llama3       {"name": "f", "parameters": {...}} as the whole answer or after a tag; several calls
             are separated by semicolons
mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}]
mistral-v11  [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}; later versions write no id

The number of Mistral's formats is the version of the model's tokenizer.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps

_START, _END = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"
_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[{]*")
# The key of the arguments. Hermes and Mistral write "arguments", Llama 3 writes "parameters".
_ARGUMENTS = ("arguments", "parameters")


def _read_calls(reader: Reader, calls: Calls, separator: str) -> Steps[None]:
    """Read several calls with this separator between them."""
    yield from _read_call(reader, calls)
    while (yield from reader.token(separator)):
        yield from _read_call(reader, calls)


def _write_call(
    key: str, around: str, writer: GrammarWriter, name: str, schema: Mapping[str, Any]
) -> str:
    """As Format.call, for {"name": ..., key: {...}} between two equal texts."""
    head = writer.text(f'{around}{{"name": {json.dumps(name)}, "{key}": ')
    return f"{head} {writer.schema(schema)} {writer.text('}' + around)}"


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
        key = yield from reader.json_text()
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
            yield from reader.json_value(lambda piece: None)
        if (yield from reader.token("}")):
            break
        yield from reader.expect(",")
    if name is None or not has_arguments:
        calls.start(name or "")
    calls.end()


def _read_hermes(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from _read_call(reader, calls)
    if (yield from reader.token(_END)):
        reader.commit()


def _read_llama3(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from _read_calls(reader, calls, ";")


def _read_mistral(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    if (yield from reader.token("[")):
        yield from _read_calls(reader, calls, ",")
        yield from reader.expect("]")
        reader.commit()
        return
    name = yield from reader.run(_NAME)
    if (yield from reader.literal(_ID)):
        yield from reader.run(_NAME)
    yield from reader.literal(_ARGS)
    yield from reader.space()
    if (yield from reader.char()) != "{":
        raise NotACall
    calls.start(name)
    yield from reader.json_value(calls.arguments)
    calls.end()


def _write_mistral(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    return f"{writer.text(name)} {writer.text(_ARGS)} {writer.schema(schema)}"


HERMES = Format(
    name="hermes",
    probe=_END,
    starts=(_START,),
    markers=(_START, _END),
    read=_read_hermes,
    call=partial(_write_call, "arguments", "\n"),
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
    call=partial(_write_call, "parameters", ""),
    separator="; ",
)
MISTRAL = Format(
    name="mistral",
    probe=_CALLS,
    starts=(_CALLS,),
    markers=(_CALLS, _ID, _ARGS),
    read=_read_mistral,
    call=partial(_write_call, "arguments", ""),
    opening="[",
    separator=", ",
    end="]",
    id_chars=9,  # The templates refuse ids of another length.
)
MISTRAL_V11 = MISTRAL._replace(
    name="mistral-v11", probe=_ARGS, call=_write_mistral, opening="", separator="", end=""
)
