"""Decides where the grammar of a reasoning model begins: at the first token or after thinking."""

from collections.abc import Sequence
from typing import Literal


def thinking_of(
    prompt: Sequence[int], think_ids: tuple[int, int], thinks: bool
) -> Literal["off", "open", "allowed"]:
    """Return `thinking` of core.Grammar for a prompt.

    think_ids: the ids that open and close thinking; -1: the model has none.
    thinks: the model may begin its answer to this prompt with thinking.
    """
    start, end = think_ids
    if start < 0:
        return "off"
    last = next((token for token in reversed(prompt) if token in think_ids), end)
    if last == start:
        return "open"
    return "allowed" if thinks else "off"
