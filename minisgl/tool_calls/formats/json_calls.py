"""Reads a call that is written as one JSON object with the name and the arguments."""

from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.reader import NotACall, Reader, Steps

# The key of the arguments. Hermes and Mistral write "arguments", Llama 3 writes "parameters".
_ARGUMENTS = ("arguments", "parameters")


def read_json_call(reader: Reader, calls: Calls) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}} in any order of the keys; other keys are dropped.

    The arguments are passed on as they are written. Arguments before the name are withheld until
    the name is known.
    """
    name = early = None
    reported = False
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from reader.json_text()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and name is None:
            name = yield from reader.json_text()
            if early is not None:
                calls.start(name)
                calls.arguments(early)
                reported = True
        elif key in _ARGUMENTS and early is None and not reported:
            if (yield from reader.char()) != "{":
                raise NotACall
            if name is None:
                parts: list[str] = []
                yield from reader.json_value(parts.append)
                early = "".join(parts)
            else:
                calls.start(name)
                reported = True
                yield from reader.json_value(calls.arguments)
        else:
            yield from reader.json_value(_drop)
        yield from reader.space()
        if (yield from reader.literal("}")):
            break
        yield from reader.expect(",")
    if not reported:
        calls.start(name or "")
    calls.end()


def _drop(piece: str) -> None:
    pass
