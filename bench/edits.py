"""The requests of `python -m bench drafts`: recorded code edits, or random prompts.

code_edits.jsonl has 20 edits, each of another file and another commit: the newest ones of 10 to 60
changed lines in files of 150 to 230 lines. A line of it has the commit, the path, the old file, and
the changes: first line, end line and new text. A text is cut into tokens like those of a tokenizer
with a large vocabulary: up to seven letters with the space before them, up to three digits, up to
two other signs, or white space. A token has 3.2 characters on average.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from minisgl.core.batch import Int32Array

EDITS = Path(__file__).with_name("code_edits.jsonl")
FIRST_TOKENS = 32  # of the file in a prompt without the whole file
_PIECE = re.compile(r" ?[A-Za-z]{1,7}|[0-9]{1,3}|[^\sA-Za-z0-9]{1,2}|\s+(?= )|\s+")


class Edit(NamedTuple):
    """A request, int32 ids. prediction: the output that its client expects, or nothing."""

    prompt: Int32Array
    output: Int32Array
    prediction: Int32Array


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of code_edits.jsonl. changes: (first line, end line, new text), in rising order."""

    commit: str
    path: str
    old: str
    changes: list[tuple[int, int, str]]


def edits_of(source: Path, count: int, vocab_size: int, whole_prompts: bool = True) -> list[Edit]:
    """Return the first `count` edits of a file like code_edits.jsonl.

    whole_prompts: the prompt is the whole old file, and not only its first tokens.
    """
    ids: dict[str, int] = {}

    def tokens(text: str) -> Int32Array:
        pieces = _PIECE.findall(text)
        numbers = [ids.setdefault(piece, len(ids)) % vocab_size for piece in pieces]
        return np.array(numbers, dtype=np.int32)

    edits = []
    for raw in source.read_bytes().splitlines()[:count]:
        line = msgspec.json.decode(raw, type=_Line)
        lines = line.old.splitlines(keepends=True)
        for first, end, text in reversed(line.changes):
            lines[first:end] = [text]
        old, new = tokens(line.old), tokens("".join(lines))
        edits.append(Edit(old if whole_prompts else old[:FIRST_TOKENS], new, old))
    return edits


def random_edits(count: int, lengths: tuple[int, int], vocab_size: int) -> list[Edit]:
    """Return requests without predictions. lengths: tokens of the prompt and of the output."""
    draws = np.random.default_rng(0)
    nothing = np.zeros(0, dtype=np.int32)

    def tokens(length: int) -> Int32Array:
        return draws.integers(0, vocab_size, length, dtype=np.int32)

    return [Edit(tokens(lengths[0]), tokens(lengths[1]), nothing) for _ in range(count)]


def pages_for(edits: Sequence[Edit], concurrency: int, page_size: int) -> int:
    """Return the KV pages of the `concurrency` longest requests together."""
    pages = sorted(-(-(len(edit.prompt) + len(edit.output)) // page_size) for edit in edits)
    return sum(pages[-concurrency:])
