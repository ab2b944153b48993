"""Steps with drafts: their work before the forward, before the sampler and after it.

A decode request starts where its previous step ended. Only the device knows this position
in time, so it stays there (ModelRunner.cached). The drafts are found in the tokens of the row and
compared with the sampled tokens on the device too. The host reads the results one step later.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.engine.logits_processing import put_texts, upload
from minisgl.engine.model_runner import ModelRunner
from minisgl.kernel import Accepted, StepViews, accept_drafts, find_drafts


class DraftStep(NamedTuple):
    """The tensors of a step with drafts.

    token_pool, cached, tails
                as in ModelRunner.
    views       the columns of all requests of the step, with padding.
    num_decode  decode requests, including padding.
    width       tokens that each of them forwards.
    found       int32 [N] on the device; the number of drafts of each request, 0 for a chunk.
    predicted   int32 [N] on the device; 1 for drafts from the client's prediction, otherwise 0.
    first_rows  int32 [N] on the device; the row of the first logits of each request.
    """

    token_pool: Tensor
    cached: Tensor
    tails: Tensor
    views: StepViews[Tensor]
    num_decode: int
    width: int
    found: Tensor
    predicted: Tensor
    first_rows: Tensor

    def set_lengths(self, batch: Batch) -> None:
        """Write the lengths and tokens that the host knows before the step to the device.

        The host knows the number of cached tokens of a chunk. It also knows the number of a decode
        request if no earlier step had drafts, as in the steps of the warm-up.
        """
        known = slice(batch.num_decode if batch.drafting else 0, batch.num_reqs)
        if known.start < known.stop:
            self.cached[self.views.rows[known].long()] = self.views.start[known]
        if not batch.histories:
            return
        columns = self.token_pool.shape[1]
        # A prediction stands at the end of its row. The request may already have more output than
        # the row has room for beside the prediction: it then keeps the last part.
        texts, tails = [], []
        for row, tokens, prediction in batch.histories:
            left = prediction[max(len(tokens) + len(prediction) - columns, 0) :]
            tails.append(columns - len(left))
            texts += [(row, 0, tokens), (row, tails[-1], left)]
        put_texts(texts, self.token_pool)
        rows = np.array([history.row for history in batch.histories])
        arrays = {"rows": rows, "tails": np.array(tails, np.int32)}
        sent = upload(arrays, self.token_pool.device)
        self.tails[sent["rows"]] = sent["tails"]

    def find(self) -> None:
        """Set views.start to the numbers of cached tokens, and write drafts to the token pool."""
        views, decoding = self.views, slice(self.num_decode)
        torch.index_select(self.cached, 0, views.rows, out=views.start)
        if self.num_decode:
            find_drafts(
                self.token_pool,
                views.rows[decoding],
                self.cached,
                self.tails,
                views.lengths[decoding],
                self.width,
                self.found[decoding],
                self.predicted[decoding],
            )

    def forwarded_views(self) -> StepViews[Tensor]:
        """Return `views`, whose lengths are the tokens that the engine forwards of each request."""
        if self.width == 1:
            return self.views
        lengths = self.views.lengths.clone()
        lengths[: self.num_decode] = self.width
        return self.views._replace(lengths=lengths)

    def token_views(self) -> StepViews[Tensor]:
        """Return the columns of the M tokens to sample, one row for each, in the form of requests.

        A decode request has `width` of these tokens, a chunk has one. The token of each row follows
        position start + length - 1, where length is 1 for a decode request.
        """
        views, num_decode, width = self.views, self.num_decode, self.width
        if width == 1:
            return views

        def expanded(column: Tensor) -> Tensor:
            repeated = column[:num_decode].repeat_interleave(width)
            has_chunks = num_decode < len(column)
            return torch.cat((repeated, column[num_decode:])) if has_chunks else repeated

        nth = torch.arange(num_decode * width, device=views.start.device, dtype=torch.int32) % width
        start, lengths = expanded(views.start), expanded(views.lengths)
        start[: len(nth)] += nth
        lengths[: len(nth)] = 1
        sampling = {name: expanded(column) for name, column in views.sampling.items()}
        rows, samples = expanded(views.rows), expanded(views.samples)
        return views._replace(
            rows=rows, start=start, lengths=lengths, samples=samples, sampling=sampling
        )

    def accept(self, drawn: Tensor, finite: Tensor) -> Tensor:
        """Compare drafts and drawn tokens, and write the new tokens and lengths of the rows.

        drawn: int32 [M], in the order of token_views; finite: bool [M]. Returns int32 [6 + W, N]:
        the first token, whether its logits are finite, the number of tokens, the number of drafts
        that agree, the number of drafts, whether they are predicted, and all W tokens.
        """
        views = self.views
        accepted: Accepted = accept_drafts(
            self.token_pool,
            views.rows,
            self.cached,
            views.lengths,
            views.samples,
            self.found[: self.num_decode],
            self.first_rows,
            drawn,
            finite,
            self.num_decode,
            self.width,
        )
        tokens = accepted.tokens.t()
        drafts = accepted.agreed, self.found, self.predicted
        counted = (accepted.finite.int(), accepted.counts, *drafts)
        return torch.cat((tokens[:1], *(column.unsqueeze(0) for column in counted), tokens))


def draft_step(
    runner: ModelRunner, views: StepViews[Tensor], num_decode: int, width: int
) -> DraftStep | None:
    """Return the tensors of a step, some of them new; None for an engine without drafts."""
    if runner.cached is None or runner.tails is None:
        return None
    reqs, device = len(views.rows), runner.device
    found, predicted = torch.zeros((2, reqs), dtype=torch.int32, device=device)
    places = torch.arange(reqs, device=device, dtype=torch.int32)
    first_rows = places if width == 1 else places + places.clamp(max=num_decode) * (width - 1)
    rows = runner.token_pool, runner.cached, runner.tails
    return DraftStep(*rows, views, num_decode, width, found, predicted, first_rows)
