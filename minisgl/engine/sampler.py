"""The sampler: a token of each row of logits, and the `Finish` that hands the tokens on.

No function waits for the device, so a CUDA graph can capture them.
"""

from typing import Protocol

import torch
from torch import Tensor

from minisgl.core.columns import SAMPLING_COLUMNS
from minisgl.engine.launched import LaunchedDrafts, LaunchedStep
from minisgl.engine.model_runner import DraftTensors, ModelRunner
from minisgl.engine.step_tensors import SamplerWork, StepColumns
from minisgl.kernel.dispatch import accept_drafts, put_tokens, sample
from minisgl.kernel.sampling import SamplingTensors


class Finish(Protocol):
    """The end of the sampler. An engine chooses one at its start, and CUDA graphs capture it."""

    @property
    def launched(self) -> type[LaunchedStep]:
        """The class of its steps, which reads the result on the host."""

    def result_rows(self, width: int) -> int:
        """Return the rows of the result of steps of `width`."""

    def put(self, columns: StepColumns, drawn: Tensor, finite: Tensor) -> Tensor:
        """Write the new tokens to the token pool, where the next step reads them.

        drawn: int32 [M], finite: bool [M], in the order of columns.token_views(). Returns the
        result for the host, int32 [result_rows(width), N], contiguous; its first two rows are the
        first token of each request, and whether the logits of this token are finite.
        """


class PutTokens:
    """Puts each drawn token into the token pool. The width of all steps is 1."""

    launched = LaunchedStep

    def __init__(self, token_pool: Tensor) -> None:
        self._token_pool = token_pool

    def result_rows(self, width: int) -> int:
        return 2

    def put(self, columns: StepColumns, drawn: Tensor, finite: Tensor) -> Tensor:
        views = columns.views
        where = views.rows, views.start, views.lengths, views.samples
        put_tokens(self._token_pool, *where, drawn)
        return torch.stack((drawn, finite.int()))


class AcceptDrafts:
    """Compares the drafts with the drawn tokens, and puts the accepted ones into the token pool."""

    launched = LaunchedDrafts

    def __init__(self, token_pool: Tensor, drafts: DraftTensors) -> None:
        self._token_pool, self._drafts = token_pool, drafts

    def result_rows(self, width: int) -> int:
        return 6 + width

    def put(self, columns: StepColumns, drawn: Tensor, finite: Tensor) -> Tensor:
        """As Finish.put, and write the lengths of the rows.

        The rows of the result: the first token, whether its logits are finite, the number of
        tokens, the number of drafts that agree, the number of drafts, whether they are predicted,
        and all `width` tokens.
        """
        views, drafts, reqs = columns.views, self._drafts, len(columns.views.rows)
        accepted = accept_drafts(
            self._token_pool,
            views.rows,
            drafts.cached,
            views.lengths,
            views.samples,
            drafts.found[: columns.num_decode],
            columns.first_logits(),
            drawn,
            finite,
            columns.num_decode,
            columns.width,
        )
        tokens = accepted.tokens.t()
        found = accepted.agreed, drafts.found[:reqs], drafts.predicted[:reqs]
        counted = (accepted.finite.int(), accepted.counts, *found)
        return torch.cat((tokens[:1], *(column.unsqueeze(0) for column in counted), tokens))


def default_finish(runner: ModelRunner) -> Finish:
    """Return the Finish of an engine that has no other."""
    if runner.drafts is None:
        return PutTokens(runner.token_pool)
    return AcceptDrafts(runner.token_pool, runner.drafts)


def draw(
    runner: ModelRunner,
    finish: Finish,
    columns: StepColumns,
    work: SamplerWork,
    logits: Tensor,
    gathered: bool = False,
) -> Tensor:
    """Draw a token for each row of logits, and return the result of `finish`.

    logits: [M, n] of this rank's ids, or with `gathered` [M, V] of all ids; the rows are those of
    columns.token_views().
    """
    views = columns.token_views()
    values = {column.name: views.sampling[column.name] for column in SAMPLING_COLUMNS}
    position = views.start + views.lengths
    params = SamplingTensors(
        **values, position=position, any_random=work.any_random, filters=work.filters
    )
    if logits.is_cpu:
        logits = logits.float()
    sampled = sample(logits, params) if gathered else runner.model.lm_head.sample(logits, params)
    return finish.put(columns, sampled.tokens, sampled.finite)
