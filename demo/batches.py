"""Training batches. Several short conversations share a row; each long document has its own row.

Batch number i depends on (seed, i) alone, so the number of worker processes does not change it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo.generate import training_sample, with_system
from demo.lexicon import Lexicon
from demo.sample import Draw, Sample
from demo.tasks.facts import TOKENS_PER_FACT, document
from demo.vocabulary import Encoder, letter_pieces, load_tokenizer

SHORT_ROW_TOKENS = 512
LONG_ROW_TOKENS = (384, 768, 1536, 3136)
_QUESTIONS_PER_DOCUMENT = 8
# Share of the training after which each long row length may be drawn.
_LENGTH_FROM = (0.0, 0.06, 0.15, 0.25)


@dataclass(frozen=True)
class Plan:
    """The inputs that, together with its number, determine a batch."""

    seed: int
    steps: int
    short_tokens: int
    long_tokens: int


class Batch(NamedTuple):
    """The tensors of one training step. Padding has document -1, and its `produced` is False.

    ids, document, produced: [rows, row tokens] int16, int8 and bool.
    long_positions: [answer tokens], for each answer token the flat index in long_ids of the token
    before it. long_targets: [answer tokens], the answer tokens. The host computes both, because on
    the GPU the computation would make every step wait for the one before it.
    """

    short_ids: Tensor
    short_document: Tensor
    short_produced: Tensor
    long_ids: Tensor
    long_positions: Tensor
    long_targets: Tensor


class _Rows:
    """Fills rows of equal length with encoded samples. alone: each sample has its own row."""

    def __init__(self, rows: int, length: int, alone: bool = False) -> None:
        self.ids = np.zeros((rows, length), dtype=np.int16)
        self.document = np.full((rows, length), -1, dtype=np.int8)
        self.produced = np.zeros((rows, length), dtype=bool)
        self._alone = alone
        self._used, self._documents = [0] * rows, [0] * rows

    def add(self, ids: list[int], produced: list[bool]) -> bool:
        """Put a sample into the first row with enough space; False if no row has it."""
        length = self.ids.shape[1]
        rows = (row for row, used in enumerate(self._used) if used + len(ids) <= length)
        row = next(rows, None)
        if row is None:
            return False
        span = slice(self._used[row], self._used[row] + len(ids))
        self.ids[row, span] = ids
        self.document[row, span] = self._documents[row]
        self.produced[row, span] = produced
        self._used[row] = length if self._alone else span.stop
        self._documents[row] += 1
        return True

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, document and produced."""
        arrays = (self.ids, self.document, self.produced)
        ids, document, produced = (torch.from_numpy(array) for array in arrays)
        return ids, document, produced

    def answers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids; then, for each token to produce, the index of the token before it, and its
        id.
        """
        ids = torch.from_numpy(self.ids)
        follows = torch.from_numpy(np.flatnonzero(self.produced))
        return ids, follows - 1, ids.flatten()[follows].long()


def long_document(draw: Draw, encoder: Encoder, tokens: int, questions: int) -> Sample:
    """Return a lookup whose conversation has at most `tokens` tokens, and not many fewer."""
    facts = max(3, tokens // (TOKENS_PER_FACT - 4))
    while True:
        sample = with_system(draw.rng, document(draw, facts, questions))
        used = len(encoder.encode(sample)[0])
        if used <= tokens:
            return sample
        facts = max(3, min(facts - 1, int(facts * (tokens / used) * 0.985)))


class BatchStream(IterableDataset[Batch]):
    """Batches 0 to steps - 1. With n workers, each worker makes every n-th batch, in order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Batch]:
        tokenizer = load_tokenizer()
        encoder, lexicon = Encoder(tokenizer), Lexicon(letter_pieces(tokenizer))
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(start, self._plan.steps, stride):
            yield self._batch(step, encoder, lexicon)

    def _batch(self, step: int, encoder: Encoder, lexicon: Lexicon) -> Batch:
        rng = random.Random(f"batch {self._plan.seed} {step}")
        short = _Rows(self._plan.short_tokens // SHORT_ROW_TOKENS, SHORT_ROW_TOKENS)
        while True:
            ids, produced = encoder.encode(training_sample(rng, lexicon))
            if len(ids) <= SHORT_ROW_TOKENS and not short.add(ids, produced):
                break
        progress = step / self._plan.steps
        allowed = [n for n, p in zip(LONG_ROW_TOKENS, _LENGTH_FROM, strict=True) if progress >= p]
        # Longer rows are harder, so draw them more often.
        length = rng.choices(allowed, weights=range(1, len(allowed) + 1))[0]
        long = _Rows(max(1, self._plan.long_tokens // length), length, alone=True)
        draw = Draw(rng, lexicon, held_out=False)
        while True:
            tokens = int(length * rng.uniform(0.55, 1.0))
            sample = long_document(draw, encoder, tokens, _QUESTIONS_PER_DOCUMENT)
            if not long.add(*encoder.encode(sample)):
                break
        return Batch(*short.packed(), *long.answers())


def loader(plan: Plan, workers: int) -> DataLoader[Batch]:
    """Return the batches in order. Worker processes make them before they are needed."""
    return DataLoader(
        BatchStream(plan),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
