"""The split between training and held-out material.

Every word, name, operand pair and wording belongs to exactly one side. A checksum of the item
decides the side, so the split needs no stored list and is the same in every run.
"""

from __future__ import annotations

import zlib

HELD_OUT_ONE_IN = 10


def split_key(kind: str, item: str) -> str:
    """Return the split key of an item. `kind` distinguishes unrelated items with equal text."""
    return f"{kind}:{item.casefold()}"


def is_held_out(key: str) -> bool:
    """Whether the item with this split key is reserved for the evaluation."""
    return zlib.crc32(key.encode("utf-8")) % HELD_OUT_ONE_IN == 0
