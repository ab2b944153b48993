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
    """The parts of a step with drafts that are the same for all its requests.

    num_decode  decode requests, including padding.
    width       tokens that each of them forwards.
    found       int32 [N] on the device; the number of drafts of each request, 0 for a chunk.
    predicted   int32 [N] on the device; 1 for drafts from the client's prediction, otherwise 0.
    first_rows  int32 [N] on the device; the row of the first logits of each request.
    """

    num_decode: int
    width: int
    found: Tensor
    predicted: Tensor
    first_rows: Tensor


def draft_step(runner: ModelRunner, reqs: int, num_decode: int, width: int) -> DraftStep:
    """Return the parts of a step of `reqs` requests with padding. Allocates the tensors."""
    found, predicted = torch.zeros((2, reqs), dtype=torch.int32, device=runner.device)
    places = torch.arange(reqs, device=runner.device, dtype=torch.int32)
    first_rows = places if width == 1 else places + places.clamp(max=num_decode) * (width - 1)
    return DraftStep(num_decode, width, found, predicted, first_rows)


def result_rows(width: int) -> int:
    """Return the number of rows of the tensor that `accept` returns."""
    return 6 + width


def set_lengths(batch: Batch, views: StepViews[Tensor], runner: ModelRunner) -> None:
    """Write the lengths and tokens that the host knows before the step to the device.

    The host knows the number of cached tokens of a chunk. It also knows the number of a decode
    request if no earlier step had drafts, as in the steps of the warm-up.
    """
    assert runner.cached is not None, "the runner must have lengths of rows; this is a bug"
    assert runner.tails is not None, "the runner must have places of predictions; this is a bug"
    known = slice(batch.num_decode if batch.drafting else 0, batch.num_reqs)
    if known.start < known.stop:
        runner.cached[views.rows[known].long()] = views.start[known]
    if not batch.histories:
        return
    columns = runner.token_pool.shape[1]
    # A prediction stands at the end of its row. The request may already have more output than the
    # row has room for beside the prediction: it then keeps the last part.
    texts, tails = [], []
    for row, tokens, prediction in batch.histories:
        left = prediction[max(len(tokens) + len(prediction) - columns, 0) :]
        tails.append(columns - len(left))
        texts += [(row, 0, tokens), (row, tails[-1], left)]
    put_texts(texts, runner.token_pool)
    rows = np.array([history.row for history in batch.histories])
    sent = upload({"rows": rows, "tails": np.array(tails, np.int32)}, runner.device)
    runner.tails[sent["rows"]] = sent["tails"]


def find(runner: ModelRunner, views: StepViews[Tensor], step: DraftStep) -> None:
    """Set views.start to the rows' numbers of cached tokens, and write drafts to the token pool."""
    assert runner.cached is not None, "the runner must have lengths of rows; this is a bug"
    assert runner.tails is not None, "the runner must have places of predictions; this is a bug"
    torch.index_select(runner.cached, 0, views.rows, out=views.start)
    decoding = slice(step.num_decode)
    if step.num_decode:
        find_drafts(
            runner.token_pool,
            views.rows[decoding],
            runner.cached,
            runner.tails,
            views.lengths[decoding],
            step.width,
            step.found[decoding],
            step.predicted[decoding],
        )


def forwarded_lengths(views: StepViews[Tensor], step: DraftStep) -> Tensor:
    """Return int32 [N]: the tokens that the engine forwards of each request."""
    if step.width == 1:
        return views.lengths
    lengths = views.lengths.clone()
    lengths[: step.num_decode] = step.width
    return lengths


def token_views(views: StepViews[Tensor], step: DraftStep) -> StepViews[Tensor]:
    """Return the columns of the M tokens to sample, one row for each, in the form of requests.

    A decode request has `width` of these tokens, a chunk has one. The token of each row follows
    position start + length - 1, where length is 1 for a decode request.
    """
    num_decode, width = step.num_decode, step.width
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


def accept(
    runner: ModelRunner,
    views: StepViews[Tensor],
    step: DraftStep,
    drawn: Tensor,
    finite: Tensor,
) -> Tensor:
    """Compare drafts and drawn tokens, and write the new tokens and lengths of the rows.

    drawn: int32 [M], in the order of token_views; finite: bool [M]. Returns int32 [6 + W, N]: the
    first token, whether its logits are finite, the number of tokens, the number of drafts that
    agree, the number of drafts, whether they are predicted, and all W tokens.
    """
    assert runner.cached is not None, "the runner must have lengths of rows; this is a bug"
    accepted: Accepted = accept_drafts(
        runner.token_pool,
        views.rows,
        runner.cached,
        views.lengths,
        views.samples,
        step.found[: step.num_decode],
        step.first_rows,
        drawn,
        finite,
        step.num_decode,
        step.width,
    )
    tokens = accepted.tokens.t()
    drafts = accepted.agreed, step.found, step.predicted
    counted = (accepted.finite.int(), accepted.counts, *drafts)
    return torch.cat((tokens[:1], *(column.unsqueeze(0) for column in counted), tokens))
