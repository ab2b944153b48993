"""Gemma 4: <|tool_call>call:f{k:<|"|>v<|"|>,n:1}<tool_call|>, one block for each call.

The text of a string stands between two quotation tokens, without escapes. Keys are bare. Strings
and keys in the quotation marks of JSON are read too.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.grammar import GrammarWriter, listed_parameters
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.raw_values import string_up_to, to_json
from minisgl.tool_calls.reader import NotACall, Reader, Steps, inside_quotes

_START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[^\s{}<>]*")
_KEY = re.compile(r"[^:{}\[\]<,\"]*")
_WORD = re.compile(r"[^\s,\]}<]*")
_PLAIN = re.compile(r"[^<]*")
_BRACKETS = {"{": "{}", "[": "[]"}


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    yield from reader.expect("call:")
    name = yield from reader.run(_NAME)
    yield from reader.expect("{")
    calls.start(name)
    while not (yield from reader.token("}")):
        calls.argument((yield from _read_key(reader)))
        yield from reader.nested(calls.arguments, _BRACKETS, ",]}", _read_scalar, _read_key)
        if not (yield from reader.token(",")):
            yield from reader.expect("}")
            break
    calls.end()
    if (yield from reader.token(_END)):
        reader.commit()


def _read_key(reader: Reader) -> Steps[str]:
    """Read a key and the colon after it."""
    yield from reader.space()
    if (yield from reader.literal(_QUOTE)):
        key = yield from reader.run(_PLAIN)
        yield from reader.expect(_QUOTE)
    elif (yield from reader.char()) == '"':
        key = yield from reader.json_text()
    else:
        key = yield from reader.run(_KEY)
    yield from reader.expect(":")
    return key


def _read_scalar(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    """Convert a text, or a word. A word that is no JSON value becomes a string."""
    if (yield from reader.literal(_QUOTE)):
        yield from _read_string(reader, take)
    elif (yield from reader.char()) == '"':
        yield from reader.json_value(take)
    else:
        word = yield from reader.run(_WORD)
        if not word:
            raise NotACall
        take(to_json(word, frozenset()))


def _read_string(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    """Convert the text up to the next quotation token."""
    take('"')
    while (yield from reader.char()):
        if (yield from reader.literal(_QUOTE)):
            take('"')
            return
        text = (yield from reader.piece(_PLAIN)) or (yield from reader.next())
        take(inside_quotes(text))
    raise NotACall


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of a call. Its parameters are in schema order.

    A string has quotation tokens. All other values are JSON.
    """
    quote = writer.text(_QUOTE)

    def write(key: str, part: Any) -> str:
        value = writer.schema(part)
        if [*writer.types[name].get(key, ())] == ["string"]:
            value = f"{quote} {string_up_to(writer, key, part, quote)}"
        return f"{writer.text(key + ':')} {value}"

    parameters = listed_parameters(writer, schema, ",", write)
    return f"{writer.text(f'call:{name}{{')} {parameters} {writer.text('}')}"


GEMMA4 = Format(
    name="gemma4",
    probe=f"{_START}call:",
    starts=(_START,),
    markers=(_START, _END, _QUOTE),
    read=_read,
    call=_write_call,
    end=_END,
)
