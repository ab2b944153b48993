"""What generation_config.json adds: further EOS ids and the author's sampling defaults."""

from collections.abc import Mapping
from typing import Any

from minisgl.core import ConfigError
from minisgl.models.fields import Fields

_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """Parameters for requests that do not give them, where the author did.

    An explicit do_sample false means greedy, so temperature 0.
    """
    fields = Fields(generation, _FILE)
    found: dict[str, int | float] = {
        name: fields.number(name) for name in _SAMPLING if fields.get(name) is not None
    }
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found | ({"temperature": 0.0} if fields.get("do_sample") is False else {})


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids of both files, sorted. Each file may hold an integer, a list or nothing."""
    found: set[int] = set()
    for name, source in (("config.json", config), (_FILE, generation)):
        value = source.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise ConfigError(f"{name}: eos_token_id must hold token ids, not {item!r}")
            found.add(item)
    return tuple(sorted(found))
