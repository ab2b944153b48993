"""Calls as elements: <invoke name="f"><parameter name="k">v</parameter></invoke>.

A value is raw text. The tool's schema gives the JSON type of the value.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from minisgl.tool_calls.grammar import GrammarWriter
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.raw_values import RawValues
from minisgl.tool_calls.reader import Reader, Steps

_NAME = re.compile(r"[^\s\"<>]*")


class Invocations(NamedTuple):
    """How a format writes a list of calls.

    end        the tag after the list.
    namespace  of the tags of calls and parameters, with its colon; "": none.
    """

    end: str
    namespace: str = ""

    @property
    def _invoke(self) -> tuple[str, str]:
        return f'<{self.namespace}invoke name="', f"</{self.namespace}invoke>"

    @property
    def _values(self) -> RawValues:
        key, end = f'<{self.namespace}parameter name="', f"</{self.namespace}parameter>"
        return RawValues(key, '">', end, "\n", follows=(key, self._invoke[1]), in_lines=False)

    def read(self, reader: Reader, calls: Calls, start: str) -> Steps[None]:
        """Read the list, as Format.read."""
        values, (invoke, invoke_end) = self._values, self._invoke
        yield from reader.expect(invoke)
        yield from values.read_call(reader, calls, _NAME, '">', invoke_end)
        while (yield from reader.token(invoke)):
            yield from values.read_call(reader, calls, _NAME, '">', invoke_end)
        if (yield from reader.token(self.end)):
            reader.commit()

    def write_call(self, writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
        """Return the expression of a call, as Format.call."""
        invoke, invoke_end = self._invoke
        head, tail = writer.text(f'{invoke}{name}">\n'), writer.text(invoke_end)
        return " ".join([head, *self._values.write(writer, name, schema), tail])
