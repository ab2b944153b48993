"""Typed access to a JSON object, with errors that name the field."""

from collections.abc import Mapping
from typing import Any

from minisgl.core import ConfigError

_BEYOND_FLOAT32 = 2.0**128


class Fields:
    """A view of one JSON object. An absent or null field takes its default, or is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the field is absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._required(key, default)
        holds = type(value) is int and value > 0
        return int(self._checked(key, value, holds, "a positive integer"))

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        holds = type(value) in (int, float) and abs(value) < _BEYOND_FLOAT32
        return float(self._checked(key, value, holds, "a number in float32"))

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        return float(self._checked(key, value, value > 0, "positive"))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._required(key, default)
        return bool(self._checked(key, value, type(value) is bool, "true or false"))

    def integers(self, key: str) -> list[int]:
        """An integer or a list of them, empty when absent."""
        value = self.get(key, [])
        items = value if isinstance(value, list) else [value]
        holds = all(type(item) is int for item in items)
        self._checked(key, value, holds, "an integer or a list of integers")
        return items

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object, empty when absent."""
        value = self.get(key, {})
        return dict(self._checked(key, value, isinstance(value, Mapping), "an object"))

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self._where} has no {key}")
        return value

    def _checked(self, key: str, value: Any, holds: bool, rule: str) -> Any:
        if not holds:
            raise ConfigError(f"{self._where}: {key} must be {rule}, not {value!r}")
        return value
