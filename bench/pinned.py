"""Drafts whose accepted length is given, so that random weights run as fast as real ones."""

from dataclasses import replace

import torch
from torch import Tensor

from bench.replaced_draws import ReplacedDraws
from minisgl.core.batch import DecodeLoad, DraftCounts, DraftLengths
from minisgl.drafts import with_head
from minisgl.engine import Extensions, ModelRunner, StepColumns
from minisgl.engine.sampler import Finish


class FixedLengths(DraftLengths):
    """All steps without prompts have the same number of drafts."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    def choose(self, step: DecodeLoad) -> DraftCounts:
        drafts = 0 if step.cost is None else min(self._drafts, step.limit)
        return DraftCounts(min(drafts, step.made), drafts)


class PinnedAcceptance(ReplacedDraws):
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
        return replace(drafting, finish=self.finish_of)

    def replaced(self, columns: StepColumns, drawn: Tensor) -> Tensor:
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
        return drawn

    def finish_of(self, runner: ModelRunner) -> Finish:
        self._token_pool, self._vocab_size = runner.token_pool, runner.model.config.vocab_size
        self._steps = torch.zeros(len(self._token_pool), dtype=torch.long, device=runner.device)
        return super().finish_of(runner)
