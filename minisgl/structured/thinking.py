"""Decides where the grammar of a reasoning model begins: at the first token or after thinking."""

from collections.abc import Sequence

import msgspec

from minisgl.core import Grammar


def for_prompt(grammar: Grammar, prompt: Sequence[int], thinks: bool) -> Grammar:
    """Return the grammar with the `thinking` of an answer to this prompt.

    thinks: the model may begin its answer to this prompt with thinking.
    """
    ids = grammar.think_start, grammar.think_end
    if grammar.think_start < 0:
        return grammar
    last = next((token for token in reversed(prompt) if token in ids), grammar.think_end)
    thinking = "open" if last == grammar.think_start else "allowed" if thinks else "off"
    return msgspec.structs.replace(grammar, thinking=thinking)
