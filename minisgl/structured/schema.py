"""Checks a JSON schema before llguidance reads it, and removes the parts without effect.

llguidance refuses most of the keywords that it cannot enforce. This module refuses the others,
which llguidance would ignore, and bounds the size of a schema. Each error names the JSON pointer of
the fault.
"""

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from minisgl.core import InvalidRequest

MAX_CHARS = 2**18  # of a schema without titles and descriptions, of a regex or of a grammar
MAX_DEPTH = 64  # nested objects and lists of a schema
MAX_ENUM_ENTRIES = 10_000  # of all enums of a schema together

# Keywords whose value maps names to schemas, and keywords whose value is data and not a schema.
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_DATA = frozenset({"const", "default", "enum", "examples", "required"})
_TEXTS = frozenset({"$comment", "description", "title"})
_UPPER = frozenset({"maximum", "exclusiveMaximum"})
_BOUNDS = _UPPER | {"minimum", "exclusiveMinimum"}
_DRAFTS: Mapping[str, int] = MappingProxyType(
    {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
)
# The draft that introduced each keyword. llguidance ignores the keyword if $schema names an earlier
# draft. inf: a keyword of draft 3 that later drafts removed.
_SINCE: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("contains", "propertyNames"), 6),
        **dict.fromkeys(("if", "then", "else"), 7),
        **dict.fromkeys(("dependentRequired", "dependentSchemas", "maxContains"), 2019),
        **dict.fromkeys(("minContains", "unevaluatedItems", "unevaluatedProperties"), 2019),
        **dict.fromkeys(("$recursiveRef",), 2019),
        **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
        **dict.fromkeys(("disallow", "divisibleBy"), float("inf")),
    }
)
# llguidance also accepts the lower-case letters of RFC 3339 and any number of digits of a second,
# which many libraries cannot read.
_DATE_TIME = r"^[^tz.]*(\.[0-9]{1,9}(Z|[+-][0-9:]*))?$"
_MAX_EXACT = 2**53  # llguidance reads numbers as 64-bit floats
_MAX_DIGITS = 300  # of an integer; a 64-bit float has at most 309
_MAX_INTEGER = 2**63 - 1  # of the integers that llguidance generates


def check_schema(text: str) -> dict[str, Any]:
    """Return the schema in this JSON text without titles, descriptions and comments.

    Raises InvalidRequest.
    """
    try:
        schema = json.loads(text, parse_int=_integer, parse_constant=_integer)
    except ValueError as error:
        raise refusal("", f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refusal("", "a schema must be an object or true")
    _check_depth(schema)
    if "x-guidance" in schema:
        raise refusal("/x-guidance", "is not supported; use whitespace_pattern")
    checker = _Checker()
    checked: dict[str, Any] = checker.read(schema, "", 2020)
    if checker.enum_entries > MAX_ENUM_ENTRIES:
        reason = f"all enums together may have at most {MAX_ENUM_ENTRIES} entries"
        raise refusal("", reason, "max_enum_entries")
    return checked


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each schema directly inside this one, with its JSON pointer. Definitions come first."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _NAMED):
        if key in _DATA:
            continue
        if isinstance(value, dict) and key not in _NAMED:
            yield _pointer(key), value
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, child in items:
                if isinstance(child, dict):
                    yield _pointer(key, name), child


def check_regex(pattern: str, pointer: str = "") -> None:
    """Refuse syntax that llguidance reads differently from Python and JavaScript.

    It refuses classes inside of a class, operators on classes and possessive quantifiers.
    """
    in_class = False
    for found in _REGEX_PART.finditer(pattern):
        part = found[0]
        if in_class and part in ("[", "&&", "--", "~~"):
            raise refusal(pointer, f"has '{part}' inside of [...]; write a backslash before it")
        if not in_class and len(part) == 2 and part[1] == "+" and part[0] != "\\":
            raise refusal(pointer, f"has the possessive quantifier '{part}'; write {part[0]}")
        if part[0] == "[" and not in_class:
            in_class = True
        elif part == "]":
            in_class = False


# A class begins with [ or [^, and a ] directly after that stands for itself.
_REGEX_PART = re.compile(r"\\.|\[\^?\]?|\]|&&|--|~~|[*+?}]\+", re.DOTALL)


def refusal(pointer: str, reason: str, limit: str | None = None) -> InvalidRequest:
    """Return the error for the part of a schema at this JSON pointer. "": the whole schema."""
    return InvalidRequest(f"{pointer}: {reason}" if pointer else reason, limit=limit)


class _Checker:
    """Copies a schema without its texts, checks each keyword and counts the entries of enums."""

    def __init__(self) -> None:
        self.enum_entries = 0

    def read(self, value: Any, pointer: str, draft: int, has_names: bool = False) -> Any:
        """Return the copy of the value at this pointer. has_names: it maps names to schemas."""
        if isinstance(value, list):
            items = enumerate(value)
            return [self.read(item, pointer + _pointer(number), draft) for number, item in items]
        if not isinstance(value, dict):
            return value
        if has_names:
            return {k: self.read(v, pointer + _pointer(k), draft) for k, v in value.items()}
        draft = _draft(value, pointer, draft)
        copy: dict[str, Any] = {}
        for key, part in value.items():
            here = pointer + _pointer(key)
            # llguidance does not know uniqueItems, and false has no effect.
            if (key in _TEXTS and isinstance(part, str)) or (
                key == "uniqueItems" and part is False
            ):
                continue
            self._check(key, part, here, draft)
            copy[key] = part if key in _DATA else self.read(part, here, draft, key in _NAMED)
        _check_min_properties(value, pointer)
        if value.get("format") == "date-time":
            parts = copy.get("allOf", [])
            copy["allOf"] = [*parts, {"pattern": _DATE_TIME}] if isinstance(parts, list) else parts
        return copy

    def _check(self, key: str, value: Any, pointer: str, draft: int) -> None:
        if _SINCE.get(key, 0) > draft:
            raise refusal(pointer, "is not a keyword of the draft in $schema; remove it")
        if key == "enum" and isinstance(value, list):
            self.enum_entries += len(value)
        if key in ("const", "enum"):
            _check_exact(value, pointer)
        if key in _BOUNDS and type(value) is int and not _keeps_bound(key, value):
            raise refusal(pointer, "needs more than 53 bits; use a rounder number")
        if key == "pattern" and isinstance(value, str):
            check_regex(value, pointer)
        if key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_regex(pattern, pointer + _pointer(pattern))


def _integer(text: str) -> int:
    """Parse an integer of JSON. Raises ValueError for one that llguidance cannot read as a float.

    Python passes NaN and Infinity too, which JSON does not have.
    """
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
    return int(text)


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH + 1):
        values = [v for each in level for v in (each.values() if type(each) is dict else each)]
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    reason = f"the schema may nest at most {MAX_DEPTH} objects and lists"
    raise refusal("", reason, "max_grammar_depth")


def _draft(schema: Mapping[str, Any], pointer: str, inherited: int) -> int:
    """The draft that $schema names; the inherited one if there is no $schema."""
    declared = schema.get("$schema")
    if not isinstance(declared, str):
        return inherited
    if re.search(r"draft-0[0-3]\b", declared):
        raise refusal(f"{pointer}/$schema", "drafts before draft-04 are not supported")
    return next((number for name, number in _DRAFTS.items() if name in declared), 2020)


def _check_min_properties(schema: Mapping[str, Any], pointer: str) -> None:
    """Refuse a minProperties that is 2 or more above the number of required names.

    llguidance could then write one optional key twice and count it as two.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least - known >= 2:
        reason = "must be at most 1 above the number of names in required"
        raise refusal(f"{pointer}/minProperties", reason)


def _check_exact(value: Any, pointer: str) -> None:
    """Refuse numbers that a 64-bit float does not hold exactly, at any depth."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_exact(item, pointer)
    elif isinstance(value, int | float) and abs(value) > _MAX_EXACT:
        raise refusal(pointer, "has a number of more than 53 bits")


def _keeps_bound(key: str, bound: int) -> bool:
    """True if the 64-bit float that replaces the bound admits no value beyond the bound."""
    if key in _UPPER:
        return min(int(float(bound)), _MAX_INTEGER) <= bound
    return max(int(float(bound)), -_MAX_INTEGER - 1) >= bound


def _pointer(*keys: str | int) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
