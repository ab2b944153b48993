"""Suggestions for a misspelt name."""

import difflib
from collections.abc import Iterable


def near_names(name: str, known: Iterable[str]) -> str:
    """Return a hint such as "; did you mean 'seed'?", or "" if no known name is similar."""
    found = difflib.get_close_matches(name[:64], list(known), n=3, cutoff=0.6)
    if not found:
        return ""
    return "; did you mean " + " or ".join(f"'{near}'" for near in found) + "?"
