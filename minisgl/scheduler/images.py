"""`Images`: which steps encode which images, and the rows of the image buffer that hold them.

A step encodes an image if one of its chunks has tokens of the image, and the buffer does not have
their features. No request waits for its images before it is admitted: the engine encodes the images
of a step before the layers, on one stream. No request holds rows either. If a later chunk needs an
image that other images have replaced meanwhile, its step encodes the image again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minisgl.core.batch import Batch, Int32Array
from minisgl.core.images import EncodeImage, ImageLimits, RopePositions
from minisgl.images.positions import rotary_positions
from minisgl.message.messages import PromptImage
from minisgl.message.stats import ImageTotals
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

_Key = tuple[bytes, tuple[int, int]]


class Images:
    """The rows of the image buffer, least recently used images first. Each rank has an equal one.

    totals: counts the images.

    I1  A step never overwrites rows that it reads itself. Steps run in order, so it may overwrite
        the rows that a step in flight reads.
    """

    def __init__(self, limits: ImageLimits | None, table: RequestTable) -> None:
        """limits: of the engine; None: no request has images."""
        if limits is None:
            limits = ImageLimits(rows=0, patch=1, merge=1, token=0, patch_price=0.0, pair_price=0.0)
        self.limits = limits
        self._table = table
        self._rows: dict[_Key, Int32Array] = {}
        self._free = np.arange(self.limits.rows, dtype=np.int32)
        self.totals = ImageTotals(rows=self.limits.rows)

    def has(self, key: _Key) -> bool:
        """The buffer has the features of this image."""
        return key in self._rows

    def complete(self, batch: Batch) -> Batch:
        """Return `batch`, in which a request has images, with images and positions.

        Rows of the buffer replace the pads in its chunks. Elsewhere the id of an image token does.
        Decode requests have no pads: their part takes no time for each image.
        """
        all_chunks = [*self._chunks(batch)]
        rope = RopePositions(self._table.rope_delta[batch.rows], self._positions(all_chunks))
        chunks = [chunk for chunk in all_chunks if chunk.req.images]
        if not chunks:
            return replace(batch, rope=rope)
        encoded = self._place(chunks)
        ids = batch.chunk_ids.copy()
        for chunk in chunks:
            for image in self._touched(chunk):
                rows, to_chunk = self._rows[_key(image)], chunk.at - chunk.start
                first, end = max(image.start, chunk.start), min(self._end(image), chunk.end)
                inputs = ~rows[first - image.start : end - image.start]
                ids[first + to_chunk : end + to_chunk] = inputs
        return replace(
            batch,
            chunk_ids=ids,
            images=tuple(encoded),
            rope=rope,
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
        for row, start, length in columns:
            yield _ChunkOf(self._table.req_at(row), start, start + length, at)
            at += length

    def _end(self, image: PromptImage) -> int:
        return image.start + self.limits.tokens(image.grid)

    def _touched(self, chunk: "_ChunkOf") -> Iterator[PromptImage]:
        for image in chunk.req.images:
            if image.start < chunk.end and self._end(image) > chunk.start:
                yield image

    def _place(self, chunks: Sequence["_ChunkOf"]) -> list[EncodeImage]:
        """Give rows to the images of these chunks, and return those that have to be encoded."""
        needed = {_key(image): image for chunk in chunks for image in self._touched(chunk)}
        for key in needed:
            if key in self._rows:
                self._rows[key] = self._rows.pop(key)  # the most recently used
                self.totals.reused += 1
        encoded = []
        for key, image in needed.items():
            if key in self._rows:
                continue
            count = self.limits.tokens(image.grid)
            while len(self._free) < count:
                oldest = next(key for key in self._rows if key not in needed)
                self._free = np.concatenate([self._free, self._rows.pop(oldest)])
            rows, self._free = self._free[:count], self._free[count:]
            self._rows[key] = rows
            price = self.limits.price(image.grid)
            encoded.append(EncodeImage(image.grid, image.pixels, rows, price))
            self.totals.encoded += 1
            self.totals.patches += image.grid[0] * image.grid[1]
        self.totals.used = self.limits.rows - len(self._free)
        return encoded

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
    """Tokens `start` to `end` - 1 of a request. The first is at place `at` of Batch.chunk_ids."""

    req: Req
    start: int
    end: int
    at: int


class ImageRoom:
    """The images that one plan adds to its step. The counters belong to the plan.

    The images of a step and its prompt tokens share the budget of prompt tokens, since both delay
    the decoding requests (ImageLimits.price). The images in the first `least` tokens of one chunk
    may exceed the budget, if the step encodes no others before: no image is encoded in parts.
    """

    def __init__(self, images: Images, least: int) -> None:
        """least: tokens of the smallest chunk."""
        self._images, self._least, self._left = images, least, images.limits.rows
        self._counted: set[_Key] = set()
        self._encodes = False

    def limit(self, req: Req, start: int, end: int, budget: int) -> int:
        """Return the most tokens of a chunk. Changes nothing.

        start, end: of the tokens of `req` that are left. budget: limit of tokens and price.
        """
        tokens, price, left = min(budget, end - start), 0, self._left
        for image, count, cost in self._new(req, start):
            before = max(image.start - start, 0)
            if before >= tokens:
                break
            may_exceed = before < self._least and not self._encodes
            if count > left or (cost > budget - price - before and not may_exceed):
                return before
            left, price = left - count, price + cost
            tokens = min(tokens, max(budget - price, before + self._least))
        return tokens

    def wait(self, req: Req, start: int, budget: int) -> bool:
        """Images leave less than the smallest chunk to a waiting request. As in `limit`."""
        end = len(req.tokens)
        return self.limit(req, start, end, budget) < min(self._least, budget, end - start)

    def add(self, req: Req, start: int, tokens: int) -> int:
        """Count the images of a chunk. Returns the price of those that it adds to the step."""
        price = 0
        for image, count, cost in self._new(req, start):
            if image.start < start + tokens:
                self._counted.add(_key(image))
                self._left -= count
                price += cost
        self._encodes = self._encodes or price > 0
        return price

    def _new(self, req: Req, start: int) -> Iterator[tuple[PromptImage, int, int]]:
        """Yield the images of `req` with tokens from `start` on that the plan has not counted.

        Each has the number of its tokens and its price, which is 0 if the buffer has it.
        """
        limits = self._images.limits
        for image in req.images:
            key, count = _key(image), limits.tokens(image.grid)
            if image.start + count > start and key not in self._counted:
                yield image, count, 0 if self._images.has(key) else limits.price(image.grid)

    def price(self, req: Req, start: int) -> int:
        """Return the price of the images from token `start` on."""
        return sum(price for _, _, price in self._new(req, start))


def _key(image: PromptImage) -> _Key:
    return image.digest, image.grid
