"""What generation_config.json adds: further EOS ids and the author's sampling defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.core import ConfigError
from minisgl.models.fields import Fields

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters for requests that do not give them; None where the author gave none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """An explicit do_sample false means greedy, so temperature 0."""
    fields = Fields(generation, _FILE)

    def number(key: str) -> float | None:
        return None if fields.get(key) is None else fields.number(key)

    temperature = number("temperature")
    if fields.get("do_sample") is False:
        temperature = 0.0
    top_k = number("top_k")
    return GenerationDefaults(
        temperature=temperature,
        top_k=None if top_k is None else int(top_k),
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


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
