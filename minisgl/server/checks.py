"""Strict checks of single JSON values. Each says what is wrong without repeating the value, and
knows the JSON schema of what it accepts, which /openapi.json shows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from minisgl.core import InvalidRequest
from minisgl.utils import near_names

Schema = dict[str, Any]


class Check(NamedTuple):
    """run(param, value): the checked value, or InvalidRequest. schema: of what it accepts."""

    run: Callable[[str, Any], Any]
    schema: Schema

    def __call__(self, param: str, value: Any) -> Any:
        return self.run(param, value)


_INT64 = 2**63


def as_is(param: str, value: Any) -> Any:
    """For what is checked elsewhere."""
    return value


def reject(param: str, rule: str, limit: str | None = None) -> InvalidRequest:
    """The error for a parameter that breaks `rule`, or exceeds the limit of this name."""
    return InvalidRequest(f"{param} {rule}", param=param, limit=limit)


def type_name(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {bool: "a boolean", int: "an integer", float: "a number"}
    names |= {str: "a string", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "of another type")


def require_type(param: str, value: object, what: str, *types: type) -> None:
    """Refuse a value that is of none of these types, as it must be `what`."""
    if type(value) not in types:
        raise reject(param, f"must be {what}, not {type_name(value)}")


def _boolean(param: str, value: Any) -> bool:
    require_type(param, value, "true or false", bool)
    return bool(value)


boolean = Check(_boolean, {"type": "boolean"})


def integer(low: int = -_INT64, high: int = _INT64 - 1, limit: str | None = None) -> Check:
    """An integer in [low, high]; a boolean or 1.0 is not one."""

    def check(param: str, value: Any) -> int:
        require_type(param, value, "an integer", int)
        if not low <= value <= high:
            rule = f"must be an integer from {low} to {high}"
            raise reject(param, rule, limit if value > high else None)
        return int(value)

    return Check(check, {"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float, above: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high] with `above`."""

    def check(param: str, value: Any) -> float:
        require_type(param, value, "a number", int, float)
        # Comparing first: float() of a huge integer would overflow.
        if not low <= value <= high or (above and value == low) or not math.isfinite(value):
            start = f"above {low:g}" if above else f"from {low:g}"
            raise reject(param, f"must be a number {start} to {high:g}")
        return float(value)

    lowest = "exclusiveMinimum" if above else "minimum"
    return Check(check, {"type": "number", lowest: low, "maximum": high})


def string(max_chars: int | None = None, empty: bool = True, limit: str | None = None) -> Check:
    """Text; `parse_body` takes none that cannot be encoded as UTF-8."""

    def check(param: str, value: Any) -> str:
        require_type(param, value, "a string", str)
        if not value and not empty:
            raise reject(param, "must not be empty")
        if max_chars is not None and len(value) > max_chars:
            raise reject(param, f"must have at most {max_chars} characters", limit)
        return str(value)

    schema: Schema = {"type": "string"}
    if not empty:
        schema["minLength"] = 1
    if max_chars is not None:
        schema["maxLength"] = max_chars
    return Check(check, schema)


def list_of(item: Check, max_items: int, min_items: int = 0, limit: str | None = None) -> Check:
    """An array of checked items; the item at fault is named by its index."""

    def check(param: str, value: Any) -> list[Any]:
        require_type(param, value, "an array", list)
        if len(value) < min_items:
            raise reject(param, "must not be empty")
        if len(value) > max_items:
            raise reject(param, f"must have at most {max_items} entries", limit)
        return [item(f"{param}[{index}]", entry) for index, entry in enumerate(value)]

    schema = {"type": "array", "items": item.schema, "maxItems": max_items}
    return Check(check, {**schema, "minItems": min_items} if min_items else schema)


def fields(known: dict[str, Check], required: tuple[str, ...] = ()) -> Check:
    """An object with these fields and no other; null counts as not given."""

    def check(param: str, value: Any) -> dict[str, Any]:
        given = _json_object(param, value)
        checked = {}
        for name, entry in given.items():
            if name not in known:
                hint = near_names(name[:64], known)
                raise reject(param or "the body", f"has an unknown field{hint}")
            if entry is not None:
                checked[name] = known[name](f"{param}.{name}" if param else name, entry)
        for name in required:
            if name not in checked:
                raise reject(f"{param}.{name}" if param else name, "is required")
        return checked

    return Check(check, object_schema({n: c.schema for n, c in known.items()}, required))


def object_schema(properties: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """JSON schema of an object in which null counts as not given."""
    nullable = {
        name: schema if name in required or not schema else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    found = {"type": "object", "properties": nullable, "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def _json_object(param: str, value: Any) -> dict[str, Any]:
    require_type(param, value, "an object", dict)
    return dict(value)


json_object = Check(_json_object, {"type": "object"})
