"""Decodes the bytes of a body to a struct of `protocol`, and refuses malformed input.

msgspec's errors become InvalidRequest or Unsupported here. `param` is the path of the field at
fault, for example `messages[3].content`. No message repeats more than 64 characters of a value.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from minisgl.core import InvalidRequest, RequestError, Unsupported
from minisgl.protocol import requests
from minisgl.protocol.requests import RequestBody, known_parameters
from minisgl.utils import near_names

Body = TypeVar("Body", bound=RequestBody)

# The text of a msgspec error and the path at its end, if there is one.
_ERROR = re.compile(r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_TEXT_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")
_EMPTY_FIELD = re.compile(rf"messages\[\d+\]\.(?:{'|'.join(requests.EMPTY_FIELDS)})\b")
# Bounds of `protocol` by field and type, with their labels in minisgl_limits_exceeded_total.
_LIMITS = {
    ("stop", "array"): "max_stop_strings",
    ("stop", "str"): "max_stop_chars",
    ("stop_token_ids", "array"): "max_stop_token_ids",
}
# Bounds of one body, which keep its decoding below 40 ms of CPU time. Lists, objects and their
# fields take up to 500 ns each to decode, with the time of the garbage collector, and other values
# up to 50 ns.
_MAX_FIELDS = 2**16
_MAX_VALUES = 2**19
_PART_BYTES = 2**18  # one step of counting


def reject(param: str, rule: str, limit: str | None = None) -> InvalidRequest:
    """Return the error for a field that breaks `rule`.

    limit: the name of the limit that the field exceeds, if it exceeds one.
    """
    return InvalidRequest(f"{param} {rule}", param=param, limit=limit)


def decode(
    raw: bytes,
    kind: type[Body],
    check_sizes: Callable[[Mapping[str, Any]], None],
    allow_unknown: bool = False,
) -> Body:
    """Return the body as a struct of this kind. The arguments and errors are as in `body_of`."""
    return body_of(parse_body(raw), kind, check_sizes, allow_unknown)


def body_of(
    given: Mapping[str, Any],
    kind: type[Body],
    check_sizes: Callable[[Mapping[str, Any]], None],
    allow_unknown: bool = False,
) -> Body:
    """Return the plain JSON of a body as a struct of this kind.

    check_sizes: raises for lists that are too long. It reads the plain JSON, because a body has
    room for 600,000 messages, and filling so many structs would take seconds.
    allow_unknown: ignore fields that a generating route does not know.
    Raises InvalidRequest, or Unsupported for a parameter that the server knows but does not offer.
    """
    known = {}
    for name, value in given.items():
        if name not in kind.__struct_fields__:
            _check_unknown(name, value, kind, allow_unknown)
        elif value is not None:
            known[name] = value
    check_sizes(known)
    try:
        return msgspec.convert(known, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, kind) from None


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. NaN, Infinity, lone surrogates and deep nesting are errors.

    Raises InvalidRequest for more lists, objects and values than one body may have.
    """
    _check_values(raw)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:200] if isinstance(error, msgspec.MsgspecError) else "not readable"
        raise InvalidRequest(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return body


@contextmanager
def nesting_limit() -> Iterator[None]:
    """Refuse a body if the block cannot write its JSON, which was nested just within the limit."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _check_values(raw: bytes) -> None:
    """Count the lists, objects, fields and values of JSON, and refuse too many.

    The first count includes characters inside strings. If this count is too high, the function
    removes the strings and counts again. Counting stops above the limits: a MiB full of a counted
    character takes 3 ms, and a MiB with few of them 0.1 ms.
    """
    if _counts_fit(raw):
        return
    if raw.count(b'"') <= 4 * _MAX_FIELDS and _counts_fit(_without_strings(raw)):
        return
    raise InvalidRequest(
        f"the body has more than {_MAX_FIELDS} lists, objects and fields, or more than "
        f"{_MAX_VALUES} values; send fewer",
        limit="max_body_values",
    )


def _counts_fit(raw: bytes) -> bool:
    fields = values = 0
    for start in range(0, len(raw), _PART_BYTES):
        end = start + _PART_BYTES
        fields += sum(raw.count(char, start, end) for char in (b"[", b"{", b":"))
        values += raw.count(b",", start, end)
        if fields > _MAX_FIELDS or values > _MAX_VALUES:
            return False
    return True


def _without_strings(raw: bytes) -> bytes:
    """Remove the strings from JSON. The result is exact up to the first error in the JSON."""
    outside: list[bytes] = []
    in_string = False
    for part in raw.split(b'"'):
        if not in_string:
            outside.append(part)
            in_string = True
        else:  # An odd number of backslashes escapes the quotation mark after them.
            in_string = part.endswith(b"\\") and (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
    return b"".join(outside)


def _check_unknown(name: str, value: Any, kind: type[RequestBody], allow_unknown: bool) -> None:
    """Raise for a field that the struct lacks, unless the field cannot change the answer."""
    others = known_parameters(kind)
    if name in others.unsupported:
        # True equals 1 in Python, so booleans need a comparison of the types too.
        neutral = [(one, isinstance(one, bool)) for one in (None, *others.unsupported[name])]
        if (value, isinstance(value, bool)) not in neutral:
            rule = others.refusals.get(name, "is not supported")
            raise Unsupported(f"{name} {rule}", param=name)
    elif not (allow_unknown or name in others.ignored):
        hint = near_names(name, (*kind.__struct_fields__, *others.ignored, *others.unsupported))
        text = f"unknown parameter '{name[:64]}'{hint}"
        raise InvalidRequest(text, param=name[:64], code="unknown_parameter")


def _refusal(error: str, given: Mapping[str, Any], kind: type[RequestBody]) -> RequestError:
    """Translate the text of a msgspec.ValidationError about this body."""
    found = _ERROR.fullmatch(error)
    assert found is not None, "the pattern matches every text; this is a bug"
    text, param = found["text"], found["path"] or ""
    part = _TEXT_PART.match(param)
    if part is not None and requests.TextPart in _types_at(kind, part[0]):
        content = given["messages"][int(part[1])]["content"][int(part[2])]
        name = content.get("type") if isinstance(content, dict) else ""
        if name not in ("text", "image_url"):
            rule = f"parts of type {str(name)[:64]!r} are not supported; expected text or image_url"
            return Unsupported(f"{part[0]}: {rule}", param=part[0])
    if _EMPTY_FIELD.match(param):
        return Unsupported(f"{param} is not supported", param=param)
    if found["key"]:
        return reject(param, "must have token ids as keys")
    if param == "logit_bias[...]":  # msgspec does not name the key of a wrong value
        param = _bias_at_fault(given["logit_bias"])
    if text.startswith("Object missing required field"):
        name = text.split("`")[1]
        return reject(f"{param}.{name}" if param else name, "is required")
    if text.startswith("Object contains unknown field"):
        name = text.split("`")[1][:64]
        fields = [field.encode_name for one in _types_at(kind, param) for field in _fields(one)]
        hint = near_names(name, fields)
        return reject(param, f"has an unknown field '{name}'{hint}")
    if text.startswith("Invalid enum value"):  # the text of msgspec repeats the value
        arms = [one for one in _types_at(kind, param) if get_origin(one) is Literal]
        values = [value for arm in arms for value in get_args(arm)]
        value = text.removeprefix("Invalid enum value ")[:64]
        return reject(param, f"must be one of {', '.join(values)}, not {value}")
    over = re.match(r"Expected `(\w+)`(?: of length)? <= ", text)
    limit = _LIMITS.get((param.partition("[")[0], over[1])) if over else None
    message = f"{param}: {text[:1].lower()}{text[1:]}"
    return InvalidRequest(message, param=param, limit=limit)


def _bias_at_fault(given: Mapping[str, Any]) -> str:
    """The path of the first value of logit_bias that is not allowed."""
    for name, value in given.items():
        try:
            msgspec.convert(value, requests.Bias)
        except msgspec.ValidationError:
            return f"logit_bias.{name[:64]}"
    return "logit_bias"


def _types_at(kind: type[RequestBody], path: str) -> list[Any]:
    """The types that the value at this path may have."""
    types = [kind]
    for name in re.findall(r"[a-z_]+", path):
        fields = [field for one in types for field in _fields(one)]
        types = [arm for field in fields if field.encode_name == name for arm in _arms(field.type)]
    return types


def _fields(kind: Any) -> Sequence[msgspec.structs.FieldInfo]:
    return msgspec.structs.fields(kind) if hasattr(kind, "__struct_fields__") else ()


def _arms(kind: Any) -> list[Any]:
    """The types in a union, and the types of the entries of lists."""
    if get_origin(kind) in (Annotated, list, Union, UnionType):
        return [arm for one in get_args(kind) for arm in _arms(one)]
    return [kind]
