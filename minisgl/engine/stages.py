"""Stages: the work of a feature in each step, from before the forward to after the sampler.

An engine assembles its stages once, at its start (Extensions.stages). A step runs their methods in
the order of the tuple. A model without a feature has no stage for it.
"""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import StateCopies
from minisgl.engine.logits_processing import upload
from minisgl.engine.model_runner import DraftTensors
from minisgl.engine.states import RowStates
from minisgl.engine.step_tensors import Logits, StepColumns, StepTensors
from minisgl.kernel.dispatch import copy_states
from minisgl.kernel.states import LOADED
from minisgl.kvcache.pool import KVPool

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


class CopyStates(Stage):
    """Copies states of rows to pages and back before the layers, as the batch says."""

    def __init__(self, states: RowStates, pool: KVPool) -> None:
        """pool: of layers with full attention."""
        self._states, self._words = states, pool.words()

    def before(self, x: StepTensors) -> None:
        if x.batch.states is not None:
            self._copy(x.batch.states)

    def _copy(self, copies: StateCopies) -> None:
        kept, boundaries, words = self._states.kept, self._states.boundaries, self._words
        arrays = {name: np.ravel(array) for name, array in copies._asdict().items()}
        sent = upload(arrays, kept.device)
        if len(copies.save_rows):
            pages = sent["save_pages"].view(copies.save_pages.shape)
            copy_states(kept, sent["save_rows"], pages, words, True)
        if len(copies.load_rows):
            pages = sent["load_pages"].view(copies.load_pages.shape)
            copy_states(kept, sent["load_rows"], pages, words, False)
            boundaries[sent["load_rows"].long()] = LOADED
