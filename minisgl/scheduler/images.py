"""`Images`: the rows of the image buffer, which hold the images that steps have encoded.

No request holds rows. If a later chunk needs an image that other images have replaced meanwhile, it
is encoded again. image_room.py decides which step encodes which image.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minisgl.core.batch import Batch, Int32Array
from minisgl.core.images import (
    EncodeImage,
    EncodingState,
    ImageLimits,
    ImageSpan,
    RopePositions,
)
from minisgl.images.positions import rotary_positions
from minisgl.message.messages import PromptImage
from minisgl.message.stats import ImageTotals
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

ImageKey = tuple[bytes, tuple[int, int]]


class EncodePart(NamedTuple):
    """The layers `first` to `end` - 1 of the encoding of an image.

    seconds, state: as in EncodeImage.
    """

    image: PromptImage
    first: int
    end: int
    seconds: float
    state: EncodingState


class Images:
    """The rows of the image buffer, least recently used images first. Each rank has an equal one.

    totals: counts the images.
    opened: the image of which the newest step has computed some layers, but not the last one.
    None: there is none, or the last request with the image has ended.

    I1  A step never overwrites rows that it reads itself. Steps run in order, so it may overwrite
        the rows that a step in flight reads.
    """

    def __init__(self, limits: ImageLimits | None, table: RequestTable) -> None:
        """limits: of the engine; None: no request has images."""
        if limits is None:
            limits = ImageLimits(0, 1, 1, 0, 0.0, 0.0, 1, 0.0)
        self.limits = limits
        self._table = table
        self._rows: dict[ImageKey, Int32Array] = {}
        self._free = np.arange(self.limits.rows, dtype=np.int32)
        self.opened: EncodePart | None = None
        self.totals = ImageTotals(rows=self.limits.rows)

    def has(self, key: ImageKey) -> bool:
        """The buffer has the features of this image."""
        return key in self._rows

    def end(self, req: Req, others: Iterable[Req]) -> None:
        """Release the images of a request that has ended. others: the open requests."""
        ended, req.images = {image_key(image) for image in req.images}, ()
        opened = None if self.opened is None else image_key(self.opened.image)
        kept = (image_key(image) for other in others for image in other.images)
        if opened in ended and opened not in kept:
            self.opened = None

    def complete(self, batch: Batch, encode: Sequence[EncodePart]) -> Batch:
        """Return `batch` with the images of `encode`, and with positions if it needs them.

        encode: as in StepPlan. Rows of the buffer replace the pads in the chunks. Elsewhere the id
        of an image token does. Decode requests have no pads: their part takes no time for each
        image.
        """
        last = self.limits.layers
        self.opened = next((part for part in encode if part.end < last), None)
        if not self._table.has_images[batch.rows].any():
            return replace(batch, images=self._place((), encode)) if encode else batch
        all_chunks, rope = [*self._chunks(batch)], None
        if self.limits.mixed:
            rope = RopePositions(self._table.rope_delta[batch.rows], self._positions(all_chunks))
        chunks = [chunk for chunk in all_chunks if chunk.req.images]
        batch = replace(batch, images=self._place(chunks, encode), rope=rope)
        if not chunks:
            return batch
        ids, spans = batch.chunk_ids.copy(), list[ImageSpan]()
        for chunk in chunks:
            for image in self._touched(chunk):
                rows, to_chunk = self._rows[image_key(image)], chunk.at - chunk.start
                first, end = max(image.start, chunk.start), min(self._end(image), chunk.end)
                inputs = ~rows[first - image.start : end - image.start]
                ids[first + to_chunk : end + to_chunk] = inputs
                spans.append(ImageSpan(chunk.nth, first, end))
        return replace(
            batch,
            chunk_ids=ids,
            spans=tuple(spans) if self.limits.mutual else (),
            logit_edits=tuple(
                edit if edit.history is None else replace(edit, history=self._ids(edit.history))
                for edit in batch.logit_edits
            ),
            histories=tuple(
                each._replace(tokens=self._ids(each.tokens)) for each in batch.histories
            ),
        )

    def _chunks(self, batch: Batch) -> Iterator["_ChunkOf"]:
        at = 0
        first = batch.num_decode
        columns = zip(
            batch.rows[first:].tolist(),
            batch.start[first:].tolist(),
            batch.lengths[first:].tolist(),
            strict=True,
        )
        for nth, (row, start, length) in enumerate(columns, first):
            yield _ChunkOf(nth, self._table.req_at(row), start, start + length, at)
            at += length

    def _end(self, image: PromptImage) -> int:
        return image.start + self.limits.tokens(image.grid)

    def _touched(self, chunk: "_ChunkOf") -> Iterator[PromptImage]:
        for image in chunk.req.images:
            if image.start < chunk.end and self._end(image) > chunk.start:
                yield image

    def _place(
        self, chunks: Sequence["_ChunkOf"], encode: Sequence[EncodePart]
    ) -> tuple[EncodeImage, ...]:
        """Give rows to the images that are complete after this step. Returns Batch.images."""
        limits = self.limits
        touched = {image_key(image) for chunk in chunks for image in self._touched(chunk)}
        needed = {*touched, *(image_key(part.image) for part in encode)}
        for key in [key for key in self._rows if key in touched]:
            self._rows[key] = self._rows.pop(key)  # the most recently used
            self.totals.reused += 1
        images = []
        for image, first, end, seconds, state in encode:
            rows = self._free[:0]
            if end == limits.layers:
                rows = self._rows[image_key(image)] = self._take(limits.tokens(image.grid), needed)
                self.totals.encoded += 1
                self.totals.patches += image.grid[0] * image.grid[1]
            images.append(EncodeImage(image.grid, image.pixels, rows, seconds, first, end, state))
        self.totals.used = limits.rows - len(self._free)
        return tuple(images)

    def _take(self, count: int, needed: Collection[ImageKey]) -> Int32Array:
        """Return free rows. Images that are not in `needed` are replaced, the oldest ones first."""
        while len(self._free) < count:
            oldest = next(key for key in self._rows if key not in needed)
            self._free = np.concatenate([self._free, self._rows.pop(oldest)])
        rows, self._free = self._free[:count], self._free[count:]
        return rows

    def _positions(self, chunks: Sequence["_ChunkOf"]) -> Int32Array | None:
        """Return RopePositions.chunks."""
        if all(not c.req.images or c.start >= self._end(c.req.images[-1]) for c in chunks):
            return None
        merge = self.limits.merge
        parts = [rotary_positions(c.req.images, merge, c.start, c.end) for c in chunks]
        return np.concatenate(parts, axis=1)

    def _ids(self, tokens: Int32Array) -> Int32Array:
        """Return tokens with the id of an image token in the place of each pad."""
        return np.where(tokens < 0, np.int32(self.limits.token), tokens)


class _ChunkOf(NamedTuple):
    """Tokens `start` to `end` - 1 of a request. The first is at place `at` of Batch.chunk_ids.

    nth: index of the request in the batch.
    """

    nth: int
    req: Req
    start: int
    end: int
    at: int


def image_key(image: PromptImage) -> ImageKey:
    """Images with equal keys have equal features."""
    return image.digest, image.grid
