"""Exact-match accuracy on held-out samples while training, without generating.

A greedy answer is right if at each position, after the right tokens before it, the most likely
token is the right one. One forward pass over the right answer checks this. The samples differ from
the shipped held-out prompts.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from demo.batches import long_document
from demo.generate import held_out_samples
from demo.lexicon import Lexicon
from demo.network import Network
from demo.sample import Draw
from demo.tasks import GENERATORS
from demo.vocabulary import Encoder, load_tokenizer

_SAMPLES = 200
_LONG_SAMPLES = 48
_LONG_TOKENS = 2990


class Validation:
    """Encoded held-out samples of every task on the training device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        encoder, lexicon = Encoder(load_tokenizer()), Lexicon()
        self._sets: dict[str, tuple[Tensor, Tensor]] = {}
        for task in GENERATORS:
            samples = held_out_samples(seed + 1000, task, _SAMPLES, lexicon)
            self._sets[task] = _padded([encoder.encode(s) for s in samples], device)
        rng = random.Random(f"validation {seed}")
        draw = Draw(rng, lexicon, held_out=True)
        documents = [long_document(draw, encoder, _LONG_TOKENS, 1) for _ in range(_LONG_SAMPLES)]
        self._sets["lookup-long"] = _padded([encoder.encode(s) for s in documents], device)

    @torch.no_grad()
    def accuracy(self, network: Network, task: str) -> float:
        """Return the share of samples of which every produced token is the most likely one."""
        ids, produced = self._sets[task]
        right = 0
        for rows in torch.arange(len(ids)).split(max(1, 65_536 // ids.shape[1])):
            states = network.hidden(ids[rows])
            best = network.logits(states[:, :-1]).argmax(-1)
            wrong = (best != ids[rows, 1:]) & produced[rows, 1:]
            right += int((~wrong.any(dim=1)).sum())
        return right / len(ids)

    def table(self, network: Network) -> str:
        """Return one line with the accuracy of each task."""
        device_type = next(iter(self._sets.values()))[0].device.type
        eager = torch.compiler.set_stance("force_eager")  # these shapes are not worth compiling
        with eager, torch.autocast(device_type, dtype=torch.bfloat16):
            cells = [f"{task} {self.accuracy(network, task):.3f}" for task in self._sets]
        return "held-out: " + ", ".join(cells)


def _padded(
    encoded: list[tuple[list[int], list[bool]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    length = max(len(ids) for ids, _ in encoded)
    ids = torch.zeros(len(encoded), length, dtype=torch.int32)
    produced = torch.zeros(len(encoded), length, dtype=torch.bool)
    for row, (sample_ids, sample_produced) in enumerate(encoded):
        ids[row, : len(sample_ids)] = torch.tensor(sample_ids, dtype=torch.int32)
        produced[row, : len(sample_produced)] = torch.tensor(sample_produced)
    return ids.to(device), produced.to(device)
