"""Qwen3-Coder, Qwen3.5 and later: <tool_call><function=f><parameter=k>v</parameter>...

A value is raw text between two newlines. The tool's schema gives the JSON type of the value.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from minisgl.core import InvalidRequest
from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps, inside_quotes
from minisgl.tool_calls.schema import properties_of

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")
_KEY = re.compile(r"[^\n>]*")
_TEXT = re.compile(r"[^\n<]*")  # the part of a value that cannot belong to an end tag
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    if start == _START:
        yield from reader.expect(_FUNCTION)
    name = yield from reader.run(_NAME)
    if not (yield from reader.literal(">")):
        raise NotACall
    has_parameter = yield from reader.token(_PARAMETER)
    if not has_parameter:
        yield from reader.expect(_FUNCTION_END)
    calls.start(name)
    types = calls.parameters.get(name, {})
    while has_parameter:
        key = yield from reader.run(_KEY)
        yield from reader.expect(">")
        calls.argument(key)
        yield from _read_value(reader, calls, frozenset(types.get(key, ())))
        has_parameter = yield from reader.literal(_PARAMETER)
    calls.end()
    yield from reader.literal(_FUNCTION_END)
    reader.commit()
    if (yield from reader.token(_END)):
        reader.commit()


def _read_value(reader: Reader, calls: Calls, types: frozenset[str]) -> Steps[None]:
    """Read a value up to the next tag. Passes on a string in pieces, other values as a whole."""
    yield from reader.literal("\n")
    if types == {"string"}:
        calls.arguments('"')
        yield from _read_text(reader, lambda text: calls.arguments(inside_quotes(text)))
        calls.arguments('"')
    else:
        parts: list[str] = []
        yield from _read_text(reader, parts.append)
        calls.arguments(to_json("".join(parts), types))


def _read_text(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    """Pass the text of a value to `take` in pieces, and read its end and the white space behind it.

    A </parameter> ends the value before a tag and at the end of the answer. A </parameter> before
    other text belongs to the value. One line break before the end belongs to the format.
    """
    line_break = ""  # has been read, and belongs to the value unless the end follows
    while (yield from reader.char()):
        text = yield from reader.piece(_TEXT)
        if not text and (yield from reader.literal(_PARAMETER_END)):
            space = yield from reader.space()
            is_end = yield from reader.comes(_PARAMETER)
            is_end = is_end or (yield from reader.comes(_FUNCTION_END))
            if is_end or not (yield from reader.char()):
                return
            text = _PARAMETER_END + space
        text = line_break + (text or (yield from reader.next()))
        line_break = "\n" if text.endswith("\n") else ""
        take(text.removesuffix("\n"))
    take(line_break)
    raise NotACall


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value whose schema allows more than strings.

    types: the JSON types that the schema allows; an empty set allows any type.
    Templates write constants as Python does (True, None). Other text becomes a string.
    """
    plain = text.strip()
    constant = _CONSTANTS.get(plain.lower(), "")
    constant_type = "null" if constant == "null" else "boolean"
    if constant and (not types or constant_type in types):
        return constant
    if "string" not in types:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            msgspec.json.decode(plain)
            return plain
    return json.dumps(text, ensure_ascii=False)


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    """Write the parameters in schema order. The text of a string is free up to its end tag."""
    parts = [writer.text(f"\n{_FUNCTION}{name}>\n")]
    for key, part, is_required in properties_of(schema):
        head, tail = writer.text(f"{_PARAMETER}{key}>\n"), writer.text(f"\n{_PARAMETER_END}\n")
        if [*writer.types[name].get(key, ())] == ["string"]:
            choices = part.get("enum", [part["const"]] if "const" in part else [])
            if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
                raise InvalidRequest(f"the enum or const of parameter {key} must have only strings")
            if choices:
                value = f"( {' | '.join(writer.text(choice) for choice in choices)} ) {tail}"
            else:
                value = writer.rule(f"/(?s:.*)/ {tail}", "[lazy]")
        else:
            value = f"{writer.schema(part)} {tail}"
        parts.append(f"( {head} {value} ){'' if is_required else '?'}")
    return " ".join([*parts, writer.text(f"{_FUNCTION_END}\n")])


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
