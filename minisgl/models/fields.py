"""Typed access to a JSON object, with errors that name the field."""

from collections.abc import Mapping
from typing import Any

from minisgl.core import ConfigError


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
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers, empty when absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(key, value, "a list of integers")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object, empty when absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self._where} has no {key}")
        return value

    def _wrong(self, key: str, value: Any, rule: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key} must be {rule}, not {value!r}")
