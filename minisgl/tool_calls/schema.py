"""The JSON types that a tool's schema allows for one of its parameters."""

from typing import Any

_MAX_DEPTH = 16  # of nested alternatives and references
_ANY: frozenset[str] = frozenset()


def property_types(schema: Any, key: str) -> frozenset[str]:
    """Return the types of the parameter `key` of a tool; empty if the schema names no type.

    schema: the schema of all parameters. A client has sent it, so it may be invalid.
    """
    return _types(_inside(schema, "properties", key), schema, _MAX_DEPTH)


def _types(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or not depth:
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        names = reference.removeprefix("#/").split("/")
        return _types(_inside(root, *names), root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list) and parts:
            each = [_types(part, root, depth - 1) for part in parts]
            return frozenset.union(*each) if all(each) else _ANY
    return _ANY


def _inside(value: Any, *names: str) -> Any:
    """The value at these nested names; None if there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
