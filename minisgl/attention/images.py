"""Attention within images, which runs in plain torch on all devices."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionRule, AttentionStep, StepAttention
from minisgl.attention.torch import attend_chunk
from minisgl.kvcache.pool import KVPool


def plan_within_images(
    pool: KVPool, rule: AttentionRule, step: AttentionStep, causal: StepAttention
) -> StepAttention:
    """Plan a prefill step whose images attend in both directions (AttentionStep.spans).

    causal: the attention of the step without this rule.
    """
    before, images = np.cumsum(step.lengths) - step.lengths - step.start, list[_Image]()
    for at, first, end in step.spans:
        begin = 0 if rule.window is None else max(0, first - rule.window + 1)
        pages = step.page_table[step.device_rows[at : at + 1]][0]
        slots = pool.slots(pages, torch.arange(begin, end, device=pages.device))
        images.append(_Image(int(before[at]) + first, int(before[at]) + end, slots))
    return _WithImages(pool, rule, causal, images)


class _Image(NamedTuple):
    """The tokens of an image in a step.

    first, end: the tokens first to end - 1 of the step. slots: of the keys to which they attend,
    from the first one that the window of the first token holds.
    """

    first: int
    end: int
    slots: Tensor


class _WithImages(NamedTuple):
    """Implements StepAttention: the results of `causal`, with those of images overwritten."""

    pool: KVPool
    rule: AttentionRule
    causal: StepAttention
    images: list[_Image]

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.causal.forward(layer, q, out, sinks)
        for first, end, slots in self.images:
            tokens, keys = slice(first, end), self.pool.read(layer, slots)
            attend_chunk(q[tokens], *keys, self.rule, sinks, out[tokens], causal=False)
