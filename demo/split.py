"""The split between training and held-out material.

Every word, name, operand pair and wording belongs to exactly one side, decided by a checksum of
the item itself. The split therefore needs no stored list and cannot drift between runs.
"""

from __future__ import annotations

import zlib

HELD_OUT_ONE_IN = 10


def split_key(kind: str, item: str) -> str:
    """Name an item for the split; `kind` keeps unrelated items with equal text apart."""
    return f"{kind}:{item.casefold()}"


def is_held_out(key: str) -> bool:
    """Say whether the item behind `key` is reserved for the evaluation."""
    return zlib.crc32(key.encode("utf-8")) % HELD_OUT_ONE_IN == 0
