"""`ReplacedDraws`: the base of a Finish that gives other tokens than those that an engine draws."""

from abc import ABC, abstractmethod

from torch import Tensor

from minisgl.engine import ModelRunner, StepColumns
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.sampler import Finish, default_finish


class ReplacedDraws(ABC):
    """Implements Finish by the engine's own one, after `replaced` has chosen the tokens."""

    @abstractmethod
    def replaced(self, columns: StepColumns, drawn: Tensor) -> Tensor:
        """Return the tokens in place of `drawn`, with its shape."""

    @property
    def launched(self) -> type[LaunchedStep]:
        return self._finish.launched

    def result_rows(self, width: int) -> int:
        return self._finish.result_rows(width)

    def put(self, columns: StepColumns, drawn: Tensor, finite: Tensor) -> Tensor:
        return self._finish.put(columns, self.replaced(columns, drawn), finite)

    def finish_of(self, runner: ModelRunner) -> Finish:
        """As Extensions.finish: called once for an engine."""
        self._finish = default_finish(runner)
        return self
