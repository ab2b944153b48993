"""The stage that copies recurrent states to KV pages and back."""

import numpy as np

from minisgl.core.batch import StateCopies
from minisgl.engine.logits_processing import upload
from minisgl.engine.stages import Stage
from minisgl.engine.states import RowStates
from minisgl.engine.step_tensors import StepTensors
from minisgl.kernel.dispatch import copy_states
from minisgl.kernel.states import LOADED
from minisgl.kvcache.pool import KVPool


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
