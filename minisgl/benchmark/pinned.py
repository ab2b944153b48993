"""Drafts whose accepted length is given, so that random weights run as fast as real ones."""

from dataclasses import replace

import torch
from torch import Tensor

from minisgl.core import Int32Array, StepCost
from minisgl.core.batch import DraftCounts, NoDrafts
from minisgl.drafts import with_head
from minisgl.engine import Extensions, ModelRunner, StepColumns
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.sampler import Finish, default_finish


class FixedLengths(NoDrafts):
    """Implements DraftLengths: all steps without prompts have the same number of drafts."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    def choose(
        self,
        rows: Int32Array,
        num_reqs: int,
        keys: int,
        limit: int,
        cost: StepCost | None,
        made: int,
    ) -> DraftCounts:
        drafts = 0 if cost is None else min(self._drafts, limit)
        return DraftCounts(min(drafts, made), drafts)


class PinnedAcceptance:
    """Replaces draws by drafts, so that steps accept a given mean number of tokens; a Finish.

    A step with K drafts gives a request floor(mean) tokens or one more. The number of earlier steps
    of its row decides which, so the mean is exact and all ranks accept the same. A step without
    drafts draws as usual.
    """

    def __init__(self, drafts: int, mean: float) -> None:
        self._drafts, self._hundredths = drafts, round(100 * mean)

    def added_to(self, extensions: Extensions) -> Extensions:
        """Return the extensions with a draft head, its fixed lengths, and this finish."""
        drafting = with_head(lambda rows: FixedLengths(self._drafts), extensions)
        return replace(drafting, finish=self._finish_of)

    @property
    def launched(self) -> type[LaunchedStep]:
        return self._finish.launched

    def result_rows(self, width: int) -> int:
        return self._finish.result_rows(width)

    def put(self, columns: StepColumns, drawn: Tensor, finite: Tensor) -> Tensor:
        width, count = columns.width, columns.num_decode
        if width == 1 + self._drafts and count:
            rows, start = columns.views.rows[:count].long(), columns.views.start[:count].long()
            steps = self._steps[rows]
            tokens = (steps + 1) * self._hundredths // 100 - steps * self._hundredths // 100
            self._steps[rows] += 1
            nth = torch.arange(width, device=rows.device)
            drafts = self._token_pool[rows.unsqueeze(1), start.unsqueeze(1) + 1 + nth]
            agrees = nth < (tokens - 1).unsqueeze(1)
            given = torch.where(agrees, drafts, (drafts + 1) % self._vocab_size).view(-1)
            drawn = torch.cat((given.to(drawn.dtype), drawn[len(given) :]))
        return self._finish.put(columns, drawn, finite)

    def _finish_of(self, runner: ModelRunner) -> Finish:
        self._token_pool, self._vocab_size = runner.token_pool, runner.model.config.vocab_size
        self._steps = torch.zeros(len(self._token_pool), dtype=torch.long, device=runner.device)
        self._finish = default_finish(runner)
        return self
