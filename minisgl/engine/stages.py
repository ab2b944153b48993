"""Stages: the work of a feature in each step, from before the forward to after the sampler.

An engine assembles its stages once, at its start (Extensions.stages). A step runs their methods in
the order of the tuple. A model without a feature has no stage for it.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from minisgl.engine.model_runner import DraftTensors
from minisgl.engine.step_tensors import Logits, StepColumns, StepTensors

# Captures a CUDA graph of a function.
GraphOf = Callable[[Callable[[], object]], torch.cuda.CUDAGraph]


class Stage:
    """A part of every step. A subclass overrides the methods that it needs; the others do nothing.

    All methods queue work on the current stream, and do not wait for the device. The work of a step
    runs in this order on the device: page table, `before` of all stages, edits, `captured` of all
    stages, layers, `forwarded` of all stages, sampler, `after` of all stages.

    reads_hidden: the stage needs the method `forwarded` in each step.
    """

    reads_hidden: ClassVar[bool] = False

    def capture(self, columns: StepColumns, graph_of: GraphOf) -> None:
        """Capture CUDA graphs of work in `after` that follows decode steps with these columns.

        Called once for each number of requests, in falling order. graph_of: captures a function.
        """

    def before(self, x: StepTensors) -> None:
        """Queue the work that needs the batch on the host, such as copies to fixed tensors.

        No CUDA graph contains this work.
        """

    def captured(self, columns: StepColumns) -> None:
        """Queue the work that begins the forward. CUDA graphs of decode steps contain it.

        It reads `columns` and tensors at fixed addresses. A step whose edits need the drafts runs
        it once more before the edits, so running it twice must have the effect of running it once.
        """

    def forwarded(self, columns: StepColumns, tokens: Tensor, hidden: Tensor) -> None:
        """Queue the work that reads the final hidden states of all tokens of the step.

        CUDA graphs of decode steps contain it. Each step runs it if a stage of the engine has
        reads_hidden; otherwise only some steps do.

        tokens: int32 [2 + pools, T], as ModelRunner.stage writes them. hidden: [T, H].
        """

    def after(self, x: StepTensors, out: Logits, tokens: Tensor) -> None:
        """Queue the work that follows the sampler.

        tokens: int32 on the device, as Finish.put returns it; step.NO_TOKENS, which has no row, if
        no request samples.
        """


class CachedLengths(Stage):
    """Keeps the number of cached tokens of each row on the device, for an engine with drafts.

    A decode request starts where its previous step ended. Only the device knows this position in
    time (DraftTensors.cached).
    """

    def __init__(self, drafts: DraftTensors) -> None:
        self._cached = drafts.cached

    def before(self, x: StepTensors) -> None:
        """Write the lengths that the host knows.

        The host knows the number of cached tokens of a chunk. It also knows the number of a decode
        request if no earlier step had drafts, as in the steps of the warm-up.
        """
        batch = x.batch
        known = slice(batch.num_decode if batch.drafting else 0, len(batch.rows))
        if known.start < known.stop:
            views = x.columns.views
            self._cached[views.rows[known].long()] = views.start[known]

    def captured(self, columns: StepColumns) -> None:
        views = columns.views
        torch.index_select(self._cached, 0, views.rows, out=views.start)
