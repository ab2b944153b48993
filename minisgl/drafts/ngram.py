"""`NgramDrafts`: drafts that continue a repetition in the tokens of a row, found on the device.

The engine compares them with the sampled tokens on the device too (engine.sampler.AcceptDrafts).
The host reads the results one step later.
"""

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import History
from minisgl.engine import ModelRunner, Stage, StepColumns, StepTensors
from minisgl.engine.logits_processing import put_texts, upload
from minisgl.kernel.dispatch import find_drafts


class NgramDrafts(Stage):
    """Writes drafts to the token pool, after the newest token of each decode request.

    tails: int32 [max_running_reqs + 1] on the device; the first position of the prediction at the
    end of each row of the token pool, or the length of the row.
    """

    def __init__(self, runner: ModelRunner, made: Tensor | None = None) -> None:
        """made: as for kernel.drafts.find_drafts."""
        assert runner.drafts is not None, "the engine must have draft lengths; this is a bug"
        self._token_pool, self._drafts = runner.token_pool, runner.drafts
        length = self._token_pool.shape[1]
        self.tails = torch.full_like(self._drafts.cached, length)
        self._made = made

    def before(self, x: StepTensors) -> None:
        if x.batch.histories:
            self._put(x.batch.histories)

    def captured(self, columns: StepColumns) -> None:
        views, count = columns.views, columns.num_decode
        found, predicted = (
            part[: len(views.rows)] for part in (self._drafts.found, self._drafts.predicted)
        )
        for part in found, predicted:
            part[count:] = 0  # a chunk has no drafts
        if count:
            find_drafts(
                self._token_pool,
                views.rows[:count],
                self._drafts.cached,
                self.tails,
                views.lengths[:count],
                columns.width,
                found[:count],
                predicted[:count],
                self._made,
            )

    def _put(self, histories: tuple[History, ...]) -> None:
        """Write the tokens of rows to the token pool, and the predictions to their ends.

        The request may already have more output than the row has room for beside the prediction: it
        then keeps the last part.
        """
        columns = self._token_pool.shape[1]
        texts, tails = [], []
        for row, tokens, prediction in histories:
            left = prediction[max(len(tokens) + len(prediction) - columns, 0) :]
            tails.append(columns - len(left))
            texts += [(row, 0, tokens), (row, tails[-1], left)]
        put_texts(texts, self._token_pool)
        rows = np.array([history.row for history in histories])
        arrays = {"rows": rows, "tails": np.array(tails, np.int32)}
        sent = upload(arrays, self._token_pool.device)
        self.tails[sent["rows"]] = sent["tails"]
