"""The parts of a tool's JSON schema that call formats need: types and definitions of parameters.

A client has sent the schema, so it may be invalid, refer to itself, and be large.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from minisgl.core import InvalidRequest

MAX_NODES = 4096  # of the schemas that `parameter_types` reads, and entries of their lists
_MAX_DEPTH = 16  # of nested alternatives and references
_ANY: frozenset[str] = frozenset()
_SECTIONS = ("$defs", "definitions")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

# The JSON types that the schema of a tool allows for each of its parameters, by the name of the
# tool and of the parameter. No entry, or no types: the schema names no type.
ParameterTypes = Mapping[str, Mapping[str, Sequence[str]]]


def parameter_types(tools: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the ParameterTypes of tools. tools: the schema of all parameters of each tool.

    Reads at most MAX_NODES nodes. The parameters that follow have no entry.
    """
    found: dict[str, dict[str, list[str]]] = {name: {} for name in tools}
    left = MAX_NODES
    for name, schema in tools.items():
        reader = _TypeReader(schema, left)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        for key, part in properties.items() if isinstance(properties, dict) else ():
            types = reader.types_of(part)
            if reader.left < 0:
                return found
            if types:
                found[name][key] = sorted(types)
        left = reader.left
    return found


class _TypeReader:
    """Reads the types of the parts of one schema. left: nodes that it may still read."""

    def __init__(self, root: Any, left: int) -> None:
        self.left = left
        self._root = root
        self._known: dict[str, frozenset[str]] = {}  # by reference; _ANY while it is being read

    def types_of(self, schema: Any, depth: int = _MAX_DEPTH) -> frozenset[str]:
        self.left -= 1
        if not isinstance(schema, dict) or not depth or self.left < 0:
            return _ANY
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, depth - 1)
        declared = schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared})
        if isinstance(declared, list):
            return frozenset(name for name in self._count(declared) if isinstance(name, str))
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if isinstance(values, list) and values:
            return frozenset(map(_type_of, self._count(values)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := schema.get(keyword), list) and parts:
                each = [self.types_of(part, depth - 1) for part in self._count(parts)]
                return frozenset.union(*each) if each and all(each) else _ANY
        return _ANY

    def _referred(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._known:
            self._known[reference] = _ANY
            target = self._root
            for name in reference.removeprefix("#/").split("/"):
                target = target.get(name) if isinstance(target, dict) else None
            self._known[reference] = self.types_of(target, depth)
        return self._known[reference]

    def _count(self, items: list[Any]) -> list[Any]:
        """Count the entries of a list as nodes. Returns [] if they are too many."""
        self.left -= len(items)
        return items if self.left >= 0 else []


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


class Parameter(NamedTuple):
    """A parameter of a tool. Parameters with equal schemas share one object `schema`."""

    name: str
    schema: Any
    is_required: bool


def properties_of(schema: Mapping[str, Any]) -> Sequence[Parameter]:
    """Return the parameters of a tool. Each schema has the definitions that it refers to.

    Raises InvalidRequest if `properties` is no object or `required` is no list.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for key, value, kind in (("properties", properties, dict), ("required", required, list)):
        if not isinstance(value, kind):
            name = "an object" if kind is dict else "an array"
            raise InvalidRequest(f"/{key}: must be {name}")
    definitions = _Definitions(schema)
    names = {name for name in required if isinstance(name, str)}
    return [
        Parameter(name, definitions.added_to(part), name in names)
        for name, part in properties.items()
    ]


class _Definitions:
    """The definitions of a schema, and the definitions to which each of them refers directly."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        sections = {key: root[key] for key in _SECTIONS if isinstance(root.get(key), dict)}
        self._sections = sections
        self._direct: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self._complete: dict[str, Any] = {}

    def added_to(self, part: Any) -> Any:
        """Return a schema with its definitions. Equal schemas give the same object."""
        if not isinstance(part, dict):
            return part
        text = json.dumps(part)
        if text not in self._complete:
            definitions: dict[str, dict[str, Any]] = {}
            for section, name in sorted(self._reachable(part)):
                definitions.setdefault(section, {})[name] = self._sections[section][name]
            self._complete[text] = {**definitions, **part}
        return self._complete[text]

    def _reachable(self, part: dict[str, Any]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        new = self._referred(part)
        while new:
            found |= new
            new = set().union(*map(self._referred_by, new)) - found
        return found

    def _referred_by(self, definition: tuple[str, str]) -> set[tuple[str, str]]:
        if definition not in self._direct:
            section, name = definition
            self._direct[definition] = self._referred(self._sections[section][name])
        return self._direct[definition]

    def _referred(self, value: Any) -> set[tuple[str, str]]:
        """The definitions to which a schema refers. A reference of another form means all."""
        found = set()
        for reference in _references(value):
            match = _DEFINITION.match(reference)
            name = unquote(match[2]).replace("~1", "/").replace("~0", "~") if match else ""
            if match is None or name not in self._sections.get(match[1], {}):
                return {(key, name) for key, names in self._sections.items() for name in names}
            found.add((match[1], name))
        return found


def _references(value: Any) -> Iterator[str]:
    """Yield each reference in a schema."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield from (r for key in _REFERENCES if isinstance(r := value.get(key), str))
            values += value.values()
        elif isinstance(value, list):
            values += value
