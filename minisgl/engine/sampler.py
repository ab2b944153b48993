"""The second half of a step: the next token of each row, from its logits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import SAMPLING_COLUMNS, Batch
from minisgl.engine.drafting import DraftStep
from minisgl.engine.model_runner import ModelRunner
from minisgl.kernel import SamplingTensors, StepViews, put_tokens, sample


class SamplingKind(NamedTuple):
    """The work that the sampler must do for a step.

    any_random  some request samples at random.
    filters     some such request uses top_k, top_p or min_p.
    """

    any_random: bool
    filters: bool


def sampling_kind(batch: Batch) -> SamplingKind:
    """Return the kind of a batch, from its sampling columns on the host."""
    columns = batch.sampling
    random: np.ndarray = columns["temperature"] > 0
    filters = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
    return SamplingKind(bool(random.any()), bool((random & filters).any()))


def sample_tokens(
    runner: ModelRunner,
    logits: Tensor,
    views: StepViews[Tensor],
    kind: SamplingKind,
    gathered: bool = False,
    drafts: DraftStep | None = None,
) -> Tensor:
    """Sample a token for each of the N rows, and write it to the token pool for the next step.

    logits: [N, n] of this rank's ids, or with `gathered` [N, V] of all ids. Returns int32 [2, N]:
    the tokens, and 1 for each row with finite logits. With `drafts`, logits has the M rows of
    DraftStep.token_views, and the result is that of DraftStep.accept. The function does not wait
    for the device, so that a CUDA graph can capture it.
    """
    sampled_views = views if drafts is None else drafts.token_views()
    columns = {column.name: sampled_views.sampling[column.name] for column in SAMPLING_COLUMNS}
    position = sampled_views.start + sampled_views.lengths
    params = SamplingTensors(
        **columns, position=position, any_random=kind.any_random, filters=kind.filters
    )
    if logits.is_cpu:
        logits = logits.float()
    sampled = sample(logits, params) if gathered else runner.model.lm_head.sample(logits, params)
    tokens, finite = sampled.tokens, sampled.finite
    if runner.replay is not None:
        given = runner.replay[sampled_views.rows.long(), position.long()]
        tokens = torch.where(given >= 0, given, tokens)
    if drafts is not None:
        return drafts.accept(tokens, finite)
    where = views.rows, views.start, views.lengths, views.samples
    put_tokens(runner.token_pool, *where, tokens)
    return torch.stack((tokens, finite.int()))
