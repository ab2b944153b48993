"""Training on several devices: each rank trains on its rows of a batch, and gradients are averaged.

`torchrun` starts one process for each device and sets RANK and WORLD_SIZE. Without these variables
there is one rank, and nothing here communicates.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from demo.batches import Batch


class Ranks:
    """The ranks of a training, seen from one of them.

    rank    number of this rank, from 0.
    count   number of ranks.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))

    def device(self, name: str) -> torch.device:
        """Connect the ranks, and return the device of this one. name: "cuda" or "cpu"."""
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if name == "cuda" else "gloo")
        if name != "cuda":
            return torch.device(name)
        torch.cuda.set_device(self.rank)
        return torch.device("cuda", self.rank)

    def part(self, batch: Batch) -> Batch:
        """Return the rows of this rank: every count-th row, from row `rank` on."""
        if self.count == 1:
            return batch
        length = batch.long_ids.shape[1]
        row = batch.long_positions // length
        mine = row % self.count == self.rank
        position = row[mine] // self.count * length + batch.long_positions[mine] % length
        rows = slice(self.rank, None, self.count)
        short = (batch.short_ids, batch.short_document, batch.short_produced)
        ids, document, produced = (tensor[rows] for tensor in short)
        long_ids, targets = batch.long_ids[rows], batch.long_targets[mine]
        return Batch(ids, document, produced, long_ids, position, targets)

    def average(self, network: torch.nn.Module) -> None:
        """Replace every gradient by its mean over the ranks."""
        if self.count == 1:
            return
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        parts: tuple[Tensor, ...] = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def from_first(self, value: float) -> float:
        """Return the value of rank 0, so that all ranks take the same decision."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)
