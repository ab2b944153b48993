"""`Images`: which steps encode which images, and the rows of the image buffer that hold them.

An image is encoded before the first chunk with its tokens, or in the step of this chunk. If the
step has no time for all layers of the encoder, it computes some of them, and the chunk ends before
the image. The next steps compute the others. No request waits for its images before it is
admitted, and the engine encodes on the stream of the layers. No request holds rows either. If a
later chunk needs an image that other images have replaced meanwhile, it is encoded again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

_Key = tuple[bytes, tuple[int, int]]


class Passed(NamedTuple):
    """A request that steps pass over. Its image lies in one chunk, which would exceed the budget.

    req    None: there is none.
    steps  steps in a row without a chunk of the request.
    """

    req: Req | None = None
    steps: int = 0


class EncodePart(NamedTuple):
    """The layers `first` to `end` - 1 of the encoding of an image. state: as in EncodeImage."""

    image: PromptImage
    first: int
    end: int
    state: EncodingState


class Images:
    """The rows of the image buffer, least recently used images first. Each rank has an equal one.

    totals: counts the images.
    opened: the image of which the newest step has computed some layers, but not the last one.
    None: there is none, or no open request has it.

    I1  A step never overwrites rows that it reads itself. Steps run in order, so it may overwrite
        the rows that a step in flight reads.
    """

    def __init__(self, limits: ImageLimits | None, table: RequestTable) -> None:
        """limits: of the engine; None: no request has images."""
        if limits is None:
            limits = ImageLimits(0, 1, 1, 0, 0.0, 0.0, 1, 0.0)
        self.limits = limits
        self._table = table
        self._rows: dict[_Key, Int32Array] = {}
        self._free = np.arange(self.limits.rows, dtype=np.int32)
        self.opened: EncodePart | None = None
        self.totals = ImageTotals(rows=self.limits.rows)

    def has(self, key: _Key) -> bool:
        """The buffer has the features of this image."""
        return key in self._rows

    def end(self, req: Req, others: Iterable[Req]) -> None:
        """Release the images of a request that has ended. others: the open requests."""
        ended, req.images = {_key(image) for image in req.images}, ()
        opened = None if self.opened is None else _key(self.opened.image)
        if opened in ended and all(_key(i) != opened for other in others for i in other.images):
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
                rows, to_chunk = self._rows[_key(image)], chunk.at - chunk.start
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
        touched = {_key(image) for chunk in chunks for image in self._touched(chunk)}
        needed = {*touched, *(_key(part.image) for part in encode)}
        for key in [key for key in self._rows if key in touched]:
            self._rows[key] = self._rows.pop(key)  # the most recently used
            self.totals.reused += 1
        images = []
        for image, first, end, state in encode:
            rows = self._free[:0]
            if end == limits.layers:
                rows = self._rows[_key(image)] = self._take(limits.tokens(image.grid), needed)
                self.totals.encoded += 1
                self.totals.patches += image.grid[0] * image.grid[1]
            price = limits.price(image.grid, end) - limits.price(image.grid, first)
            images.append(EncodeImage(image.grid, image.pixels, rows, price, first, end, state))
        self.totals.used = limits.rows - len(self._free)
        return tuple(images)

    def _take(self, count: int, needed: Collection[_Key]) -> Int32Array:
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


class ImageRoom:
    """The images that one plan adds to its step. The counters belong to the plan.

    The images of a step and its prompt tokens share the budget of prompt tokens, since both delay
    the decoding requests (ImageLimits.price). If the budget has no room for all layers of an image,
    the step computes some of them, at least one. At most one image has layers left after a step,
    because the engine keeps the state of one. The next step continues it first if an admitted
    prompt needs it, so that each image comes to its end. Other images wait meanwhile. Other prompts
    get the smallest chunk at least.

    A step without decoding requests delays no stream, and it must have a chunk. The images in the
    first `least` tokens of one chunk are therefore encoded whole there, if the step encodes no
    others before.

    Images whose tokens attend to each other lie in one chunk each (ImageLimits.mutual). Their
    tokens may exceed the budget in the same place, if no other request has a chunk in the step.
    """

    def __init__(
        self, images: Images, chunks: Mapping[Req, int], least: int, divides: bool
    ) -> None:
        """chunks: those of the plan. least: tokens of the smallest chunk.

        divides: requests decode in the step.
        """
        self._images, self._chunks, self._least, self._divides = images, chunks, least, divides
        self._limits, self._left = images.limits, images.limits.rows
        self._counted: set[_Key] = set()
        self._opened: _Key | None = None
        self._parts: dict[_Key, EncodePart] = {}
        self._resumed: PromptImage | None = None  # it shares the step with prompts
        self._exceeding: dict[Req, None] = {}  # whose images exceed the budget beside others

    @property
    def parts(self) -> tuple[EncodePart, ...]:
        """The encodings of the step."""
        return tuple(self._parts.values())

    def resume(self, reqs: Iterable[tuple[Req, int]], budget: int, others: bool) -> int:
        """Continue the image that the newest step left, if a request needs it.

        reqs: admitted requests, and the number of tokens that each has computed. others: there is
        more than one prompt; the image then leaves the smallest chunk to prompts, and `finish` adds
        the rest of their budget. Returns the budget that is left.
        """
        opened = self._images.opened
        if opened is None:
            return budget
        image, key = opened.image, _key(opened.image)
        needed = any(
            _key(each) == key and each.start + self._limits.tokens(each.grid) > start
            for req, start in reqs
            for each in req.images
        )
        if not needed:
            return budget
        if self._divides and others:
            self._resumed = image
            return max(budget - self._advance(image, budget - self._least, least=1), self._least)
        if self._divides:
            return budget - self._advance(image, budget, least=1)
        return max(budget - self._advance(image, self._rest(image)), self._least)

    def finish(self, budget: int) -> None:
        """Compute further layers of the image of `resume` with the budget that prompts leave."""
        if self._resumed is not None:
            self._advance(self._resumed, budget)

    def passed_over(self, before: Passed, prompts: Iterable[Req]) -> Passed:
        """Return the request that the plan passes over. before: by the plans before it."""
        if before.req is not None and before.req not in self._chunks and before.req in prompts:
            return Passed(before.req, before.steps + 1)
        req = next((req for req in self._exceeding if req not in self._chunks), None)
        return Passed(req, int(req is not None))

    def encodes(self, req: Req) -> bool:
        """The step computes layers of an image of this request."""
        return any(_key(image) in self._parts for image in req.images)

    def limit(self, req: Req, start: int, end: int, budget: int) -> int:
        """Return the most tokens of a chunk. Remembers a request for `passed_over`.

        start, end: of the tokens of `req` that are left. budget: limit of tokens and price.
        """
        tokens, price, left = min(budget, end - start), 0, self._left
        for image, count, cost in self._new(req, start):
            before = max(image.start - start, 0)
            if before >= tokens:
                break
            may_exceed = before < self._least and not (self._divides or self._parts)
            if count > left or (cost > max(budget - price - before, 0) and not may_exceed):
                return before
            left, price = left - count, price + cost
            least = before + self._least
            if self._limits.mutual:
                least = image.start + self._limits.tokens(image.grid) - start
                may_exceed = before < self._least and self._chunks.keys() <= {req}
                if least > budget and not may_exceed:
                    self._exceeding[req] = None
                    return before
                tokens = max(tokens, least)
            tokens = min(tokens, max(budget - price, least))
        return tokens

    def whole(self, req: Req, start: int, tokens: int) -> int:
        """Return the tokens of a chunk, without those of an image that the chunk does not end."""
        if self._limits.mutual:
            for image in req.images:
                end = image.start + self._limits.tokens(image.grid)
                if image.start < start + tokens < end:
                    return max(image.start - start, 0)
        return tokens

    def wait(self, req: Req, start: int, budget: int) -> bool:
        """Images leave less than the smallest chunk to a waiting request. As in `limit`.

        The request does not wait if the step can begin to encode the image after this chunk.
        """
        end = len(req.tokens)
        tokens = self.limit(req, start, end, budget)
        if tokens >= min(self._least, budget, end - start):
            return False
        image = self._following(req, start, tokens)
        if image is None:
            return True
        return tokens > 0 and not self._limits.layers_within(image.grid, budget - tokens)

    def add(self, req: Req, start: int, tokens: int, budget: int) -> int:
        """Count the images of a chunk, and encode a part of the image after it.

        budget: the prompt tokens that the chunk leaves. Returns the price of the encoding.
        """
        price = 0
        for image, count, cost in self._new(req, start):
            if max(image.start - start, 0) >= tokens:
                break
            if cost:
                price += self._advance(image, cost)
            else:
                self._count(image, count)
        # Without decoding rows and without a chunk, it would take the budget of the first chunk.
        following = self._following(req, start, tokens) if tokens or self._divides else None
        if following is not None and following is not self._resumed:
            begins = not (tokens or self._resumed or _key(following) in self._parts)
            price += self._advance(following, budget - price, least=int(begins))
        return price

    def price(self, req: Req, start: int) -> int:
        """Return the price of the images from token `start` on."""
        return sum(price for _, _, price in self._new(req, start))

    def _new(self, req: Req, start: int) -> Iterator[tuple[PromptImage, int, int]]:
        """Yield the images of `req` with tokens from `start` on.

        Each has the number of its rows that the plan has not counted, and the price of its layers
        that are left.
        """
        for image in req.images:
            count = self._limits.tokens(image.grid)
            if image.start + count > start:
                new = _key(image) not in self._counted
                yield image, count * new, self._rest(image)

    def _rest(self, image: PromptImage) -> int:
        """Return the price of the layers that are left, 0 if the buffer has the image."""
        if self._images.has(_key(image)):
            return 0
        price, begun = self._limits.price, self._begun(image)
        return price(image.grid) - price(image.grid, 0 if begun is None else begun.end)

    def _begun(self, image: PromptImage) -> EncodePart | None:
        """Return the newest layers of an image that this step or those before it compute."""
        part = self._parts.get(_key(image), self._images.opened)
        return None if part is None or _key(part.image) != _key(image) else part

    def _following(self, req: Req, start: int, tokens: int) -> PromptImage | None:
        """Return the image right after a chunk, if the step may compute a part of its layers."""
        for image, _, cost in self._new(req, start):
            before = max(image.start - start, 0)
            if before >= tokens:
                free = self._opened in (None, _key(image))
                return image if before == tokens and cost and free else None
        return None

    def _advance(self, image: PromptImage, budget: int, least: int = 0) -> int:
        """Compute the further layers of an image for which the budget has room.

        least: of these layers. The last layer also needs rows of the buffer. Returns the price.
        """
        limits, key, begun = self._limits, _key(image), self._begun(image)
        first, state = (0, EncodingState()) if begun is None else (begun.end, begun.state)
        count, price = limits.tokens(image.grid), limits.price(image.grid, first)
        end = max(limits.layers_within(image.grid, price + budget), first + least)
        end = min(end, limits.layers if count <= self._left else limits.layers - 1)
        if end <= first:
            return 0
        in_step = self._parts.get(key)
        first = first if in_step is None else in_step.first
        self._parts[key] = EncodePart(image, first, end, state)
        if end == limits.layers:
            self._count(image, count)
            self._opened = None if self._opened == key else self._opened
        else:
            self._opened = key
        return limits.price(image.grid, end) - price

    def _count(self, image: PromptImage, count: int) -> None:
        """Reserve the rows of an image, which the step reads or writes."""
        self._counted.add(_key(image))
        self._left -= count


def _key(image: PromptImage) -> _Key:
    return image.digest, image.grid
