"""Python calls: [f(a=1, b='x'), g()]. Llama 4, small Llama 3.2, LFM2 and OLMo 3 write them.

The values are Python literals. They are converted to JSON while they arrive.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter, listed_parameters
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps, inside_quotes

# The list stands between these markers, or is the whole answer. OLMo 3 writes no brackets.
_ENDS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}
_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"\w*")
_WORD = re.compile(r"[^\s,:()\[\]{}'\"]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PLAIN = re.compile(r"[^'\"\\]*")
_HEX = re.compile(r"[0-9a-fA-F]")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"[": "[]", "(": "[]", "{": "{}"}  # in Python and in JSON
_CLOSING = ",:)]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    if not (yield from reader.token("[")) and start != "<function_calls>":
        raise NotACall
    while True:
        yield from _read_call(reader, calls)
        yield from reader.token(",")
        if (yield from reader.token("]")):
            reader.commit()
            yield from reader.space()
            break
        if (yield from reader.char()) in ("", "<"):
            break
    if start and (yield from reader.literal(_ENDS[start])):
        reader.commit()


def _read_call(reader: Reader, calls: Calls) -> Steps[None]:
    """Read f(a=1). The call begins once the text has the form of a call with named arguments."""
    yield from reader.space()
    name = yield from reader.run(_NAME)
    yield from reader.expect("(")
    while not (yield from reader.token(")")):
        key = yield from reader.run(_KEY)
        yield from reader.expect("=")
        if not calls.is_open:
            calls.start(name)
        calls.argument(key)
        yield from reader.nested(calls.arguments, _BRACKETS, _CLOSING, _read_scalar)
        if not (yield from reader.token(",")):
            yield from reader.expect(")")
            break
    if not calls.is_open:
        calls.start(name)
    calls.end()


def _read_scalar(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    """Convert a string or a word. A word that is no JSON value becomes a string."""
    char = yield from reader.char()
    if char in "'\"":
        yield from _read_string(reader, take)
    elif char not in _CLOSING:  # which ends an argument without a value
        word = yield from reader.run(_WORD)
        constant = _CONSTANTS.get(word, word)
        is_json = constant in ("true", "false", "null") or _NUMBER.fullmatch(word)
        take(constant if is_json else json.dumps(word, ensure_ascii=False))


def _read_string(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    quote = yield from reader.next()
    take('"')
    while char := (yield from reader.char()):
        if char not in "'\"\\":
            take(inside_quotes((yield from reader.piece(_PLAIN))))
            continue
        yield from reader.next()
        if char == quote:
            take('"')
            return
        take((yield from _read_escape(reader)) if char == "\\" else inside_quotes(char))
    raise NotACall


def _read_escape(reader: Reader) -> Steps[str]:
    """Convert the characters after a backslash to the inside of a JSON string."""
    char = yield from reader.next()
    if char == "\n":
        return ""
    if char not in _HEX_DIGITS:
        kept = char if char in "'\"\\/" else f"\\{char}"
        return inside_quotes(_ESCAPES.get(char, kept))
    digits = ""
    while len(digits) < _HEX_DIGITS[char] and _HEX.match((yield from reader.char())):
        digits += yield from reader.next()
    if len(digits) < _HEX_DIGITS[char] or int(digits, 16) > 0x10FFFF:
        return inside_quotes(f"\\{char}{digits}")
    # JSON has the escape \u too, which may also stand for half of a character.
    return f"\\u{digits}" if char == "u" else json.dumps(chr(int(digits, 16)))[1:-1]


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of a call. Its parameters are in schema order, its values are JSON."""
    parameters = listed_parameters(
        writer, schema, ", ", lambda key, part: f"{writer.text(key + '=')} {writer.schema(part)}"
    )
    return f"{writer.text(name + '(')} {parameters} {writer.text(')')}"


PYTHONIC = Format(
    name="pythonic",
    probe="(",
    starts=tuple(_ENDS),
    markers=(*_ENDS, *_ENDS.values()),
    bare="[",
    read=_read,
    call=_write_call,
    opening="[",
    separator=", ",
    end="]",
)
