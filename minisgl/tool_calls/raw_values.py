"""Arguments whose values are raw text between two tags. The tool's schema gives their types."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from minisgl.core import InvalidRequest
from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps, inside_quotes
from minisgl.tool_calls.schema import properties_of

_TEXT = re.compile(r"[^\n<]*")  # the part of a value that cannot belong to an end tag
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class RawValues(NamedTuple):
    """How a format writes the arguments of a call.

    key        text before the name of an argument.
    value      text between the name and its value. Its line breaks are optional.
    end        the tag after the value.
    after      text after that tag.
    follows    one of these tags comes next. An end tag before other text belongs to the value.
    in_lines   a value stands between two line breaks, which do not belong to it.
    """

    key: str
    value: str
    end: str
    after: str
    follows: tuple[str, ...]
    in_lines: bool

    def read_call(
        self, reader: Reader, calls: Calls, name: re.Pattern[str], name_end: str, end: str
    ) -> Steps[None]:
        """Read a call from its name up to `end`, its last tag, which may be missing.

        name: matches names. name_end: the text after the name.
        """
        called = yield from reader.run(name)
        if not (yield from reader.literal(name_end)):
            raise NotACall
        has_argument = yield from reader.token(self.key)
        if not has_argument:
            yield from reader.expect(end)
        calls.start(called)
        types = calls.parameters.get(called, {})
        name_of_argument = re.compile(rf"[^\n{re.escape(self.value[0])}]*")
        while has_argument:
            key = yield from reader.run(name_of_argument)
            for part in self.value.splitlines():
                yield from reader.expect(part)
            calls.argument(key)
            yield from self.read(reader, calls, frozenset(types.get(key, ())))
            has_argument = yield from reader.literal(self.key)
        calls.end()
        yield from reader.literal(end)
        reader.commit()

    def read(self, reader: Reader, calls: Calls, types: frozenset[str]) -> Steps[None]:
        """Read a value and its end. Passes on a string in pieces, other values as a whole.

        types: the JSON types that the schema allows. Raises NotACall if the answer ends before.
        """
        if self.in_lines:
            yield from reader.literal("\n")
        if types == {"string"}:
            calls.arguments('"')
            yield from self._read_text(reader, lambda text: calls.arguments(inside_quotes(text)))
            calls.arguments('"')
        else:
            parts: list[str] = []
            yield from self._read_text(reader, parts.append)
            calls.arguments(to_json("".join(parts), types))

    def _read_text(self, reader: Reader, take: Callable[[str], None]) -> Steps[None]:
        """Pass the text of a value to `take` in pieces, and read its end and the space behind it.

        An end tag also ends the value at the end of the answer.
        """
        line_break = ""  # has been read, and belongs to the value unless the end follows
        while (yield from reader.char()):
            text = yield from reader.piece(_TEXT)
            if not text and (yield from reader.literal(self.end)):
                space = yield from reader.space()
                is_end = False
                for tag in self.follows:
                    is_end = is_end or (yield from reader.comes(tag))
                if is_end or not (yield from reader.char()):
                    return
                text = self.end + space
            text = line_break + (text or (yield from reader.next()))
            line_break = "\n" if self.in_lines and text.endswith("\n") else ""
            take(text.removesuffix(line_break))
        take(line_break)
        raise NotACall

    def write(self, writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Write the arguments in schema order. The text of a string is free up to its end tag.

        Raises InvalidRequest for a string whose enum or const has other values.
        """
        parts = []
        for key, part, is_required in properties_of(schema):
            head, tail = f"{self.key}{key}{self.value}", f"{self.end}{self.after}"
            if self.in_lines:
                head, tail = f"{head}\n", f"\n{tail}"
            head, tail = writer.text(head), writer.text(tail)
            if [*writer.types[name].get(key, ())] == ["string"]:
                value = string_up_to(writer, key, part, tail)
            else:
                value = f"{writer.schema(part)} {tail}"
            parts.append(f"( {head} {value} ){'' if is_required else '?'}")
        return parts


def string_up_to(writer: GrammarWriter, key: str, part: Any, tail: str) -> str:
    """Return an expression for the text of a string parameter, and for the tail after it.

    part: the schema of the parameter. tail: an expression. Raises InvalidRequest for a string whose
    enum or const has other values.
    """
    choices = part.get("enum", [part["const"]] if "const" in part else [])
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise InvalidRequest(f"the enum or const of parameter {key} must have only strings")
    if choices:
        return f"( {' | '.join(writer.text(choice) for choice in choices)} ) {tail}"
    return writer.rule(f"/(?s:.*)/ {tail}", "[lazy]")


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
