"""The tensors of one step: the packed batch on the host, and its columns on the device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core.batch import Batch, Int32Array, PageUpdates
from minisgl.core.columns import Column, sampling_arrays
from minisgl.kernel.step import StepLayout, StepViews


class SamplerWork(NamedTuple):
    """The work that the sampler must do for a step.

    any_random  some request samples at random.
    filters     some such request uses top_k, top_p or min_p.
    """

    any_random: bool
    filters: bool


class StepColumns(NamedTuple):
    """The requests of a step, as columns on the device. Those of a CUDA graph are fixed tensors.

    views       the columns of N requests: those of the batch, and padding.
    num_decode  decode requests, including padding. They come first.
    width       tokens that each of them forwards.
    """

    views: StepViews
    num_decode: int
    width: int

    def forwarded_lengths(self) -> Tensor:
        """Return int32 [N]: the tokens that the engine forwards of each request."""
        if self.width == 1:
            return self.views.lengths
        lengths = self.views.lengths.clone()
        lengths[: self.num_decode] = self.width
        return lengths

    def first_logits(self) -> Tensor:
        """Return int32 [N]: the row of the first logits of each request."""
        views, reqs = self.views, len(self.views.rows)
        if self.num_decode == reqs:
            return views.first
        places = torch.arange(reqs, device=views.rows.device, dtype=torch.int32)
        if self.width == 1:
            return places
        return places + places.clamp(max=self.num_decode) * (self.width - 1)

    def token_views(self) -> StepViews:
        """Return the columns of the M tokens to sample, one row for each, in the form of requests.

        A decode request has `width` of these tokens, a chunk has one. The token of each row follows
        position start + length - 1, where length is 1 for a decode request with width above 1.
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


class PackedBatch(NamedTuple):
    """A batch in one buffer on the host. The buffer has its own order of the requests.

    order           intp [B]; the request at position i of the buffer has index order[i] in the
                    batch.
    start, lengths  int32 [N], in the order of the buffer. N is B plus padding. `lengths` are the
                    tokens that the engine forwards: `width` for every decode request.
    sampler_work    for these requests.
    buffer          int32, pinned for a GPU: the columns of StepLayout, then the page updates, as
                    int64 [U] places in the flat page table and int32 [U] page ids, then chunk_ids,
                    then RopePositions.chunks.
    sizes           elements of these four parts after the columns.
    """

    order: NDArray[np.intp]
    start: Int32Array
    lengths: Int32Array
    sampler_work: SamplerWork
    buffer: Tensor
    sizes: list[int]


class StepTensors(NamedTuple):
    """A loaded step: a batch, on the host and on the device.

    columns    the requests on the device.
    chunk_ids  int32 on the device, as in the batch.
    rope       int32 on the device, as RopePositions.chunks; None if the batch has none.
    by_graph   whether a CUDA graph runs the step.
    """

    batch: Batch
    packed: PackedBatch
    columns: StepColumns
    chunk_ids: Tensor
    rope: Tensor | None
    by_graph: bool

    def places(self) -> NDArray[np.intp]:
        """Return intp [B]: the position in the buffer of each request of the batch."""
        return np.argsort(self.packed.order)

    def logit_rows(self) -> NDArray[np.intp]:
        """Return intp [B]: the row of the first logits of each request of the batch."""
        places, columns = self.places(), self.columns
        more = np.minimum(places, columns.num_decode) * (columns.width - 1)
        first: NDArray[np.intp] = places + more
        return first


@dataclass(slots=True, eq=False)
class Logits:
    """The result of a forward.

    hidden  [T or more, H], the states of all tokens after the final norm. None in a GraphStep.
            Otherwise set if a stage reads_hidden, or if a request asks for log-probabilities of
            its prompt.
    local   [M, n] of this rank's ids, a row for each token to sample.
    full    float32 [M, V] of all ids, before any edit. None unless the step needs them.
    """

    hidden: Tensor | None
    local: Tensor
    full: Tensor | None = None


class Packer(NamedTuple):
    """Writes batches into packed buffers.

    columns    sampling columns.
    dummy_row  the row of padding requests. They forward tokens to the dummy page and write no
               sampled token.
    max_pages  pages of a row of the page table.
    pinned     whether the buffers are pinned. A kernel can access pinned memory only.
    """

    columns: tuple[Column, ...]
    dummy_row: int
    max_pages: int
    pinned: bool

    def pack(self, batch: Batch, layout: StepLayout, width: int) -> PackedBatch:
        """Write the batch to a buffer, padded to the requests of `layout`.

        width: tokens that the engine forwards of each decode request. Decode requests are ordered
        by decreasing context length. The thread blocks of attention that start last then have
        little work, and all multiprocessors end at about the same time.
        """
        reqs, decode, updates = len(batch.rows), batch.num_decode, batch.page_updates
        order = np.arange(reqs)
        order[:decode] = np.argsort(-batch.start[:decode], kind="stable")
        count, chunks = len(updates.ids), batch.chunk_ids
        mixed = None if batch.rope is None else batch.rope.chunks
        positions = chunks[:0] if mixed is None else mixed.ravel()
        sizes = [2 * count, count, len(chunks), len(positions)]
        buffer = torch.empty(layout.words + sum(sizes), dtype=torch.int32, pin_memory=self.pinned)
        host: NDArray[Any] = buffer.numpy()
        fields = host[layout.fields].reshape(6, layout.reqs)
        rows, start, lengths, first, samples, deltas = fields
        fields[:, reqs:] = 0
        rows[:reqs], rows[reqs:] = batch.rows[order], self.dummy_row
        start[:reqs], samples[:reqs] = batch.start[order], batch.samples[order]
        lengths[:reqs], lengths[reqs:] = batch.lengths[order], 1
        deltas[:] = 0
        if batch.rope is not None:
            deltas[:reqs] = batch.rope.deltas[order]
        for column, place in layout.columns:
            target, values = host[place].view(column.dtype), batch.sampling.get(column.name)
            target[:] = column.neutral
            if values is not None:
                target[:reqs] = values[order]
        # Padding is at the end, so it is part of the decode requests of a step without chunks.
        forwarded = lengths.copy()
        forwarded[: layout.reqs if decode == reqs else decode] = width
        first[0] = 0
        np.cumsum(forwarded[:-1], out=first[1:])
        after = host[layout.words :]
        places: NDArray[np.int64] = after[: 2 * count].view(np.int64)
        np.multiply(updates.rows, self.max_pages, out=places, dtype=np.int64)
        places += updates.cols
        np.concatenate((updates.ids, chunks, positions), out=after[2 * count :])
        given = batch.sampling
        random = given["temperature"] > 0
        filters = (given["top_k"] > 0) | (given["top_p"] < 1) | (given["min_p"] > 0)
        work = SamplerWork(bool(random.any()), bool((random & filters).any()))
        return PackedBatch(order, start, forwarded, work, buffer, sizes)


def empty_batch() -> Batch:
    """Return a batch without requests. A graph that loads it computes padding only."""
    nothing = np.zeros(0, dtype=np.int32)
    return Batch(
        step_id=0,
        num_decode=0,
        rows=nothing,
        start=nothing,
        lengths=nothing,
        samples=np.zeros(0, dtype=np.bool_),
        chunk_ids=nothing,
        page_updates=PageUpdates(nothing, nothing, nothing),
        sampling=sampling_arrays(()),
    )
