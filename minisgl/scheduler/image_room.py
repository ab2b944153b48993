"""`ImageRoom`: the images that one plan encodes, and the chunks that they allow.

An image is encoded before the first chunk with its tokens, or in the step of this chunk. If the
step has no time for all layers of the encoder, it computes some of them, and the chunk ends before
the image. The next steps compute the others. No request waits for its images before it is
admitted, and the engine encodes on the stream of the layers.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from minisgl.core.images import EncodingState
from minisgl.message.messages import PromptImage
from minisgl.scheduler.image_prices import ImagePrices
from minisgl.scheduler.images import EncodePart, ImageKey, Images, image_key
from minisgl.scheduler.request import Req


class Passed(NamedTuple):
    """A request that steps pass over. Its image lies in one chunk, which would exceed the budget.

    req    None: there is none.
    steps  steps in a row without a chunk of the request.
    """

    req: Req | None = None
    steps: int = 0


class ImageRoom:
    """The images that one plan adds to its step. The counters belong to the plan.

    The images of a step and its prompt tokens share the budget of prompt tokens, since both delay
    the decoding requests (ImagePrices). If the budget has no room for all layers of an image,
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
        self._prices = ImagePrices(0, 0.0)
        self._price, self._taken = 0, 0  # of the encodings so far, and the tokens that they take
        self._counted: set[ImageKey] = set()
        self._opened: ImageKey | None = None
        self._parts: dict[ImageKey, EncodePart] = {}
        self._resumed: PromptImage | None = None  # it shares the step with prompts
        self._exceeding: dict[Req, None] = {}  # whose images exceed the budget beside others

    @property
    def parts(self) -> tuple[EncodePart, ...]:
        """The encodings of the step."""
        return tuple(self._parts.values())

    def resume(self, reqs: Iterable[tuple[Req, int]], prices: ImagePrices, others: bool) -> int:
        """Continue the image that the newest step left, if a request needs it.

        reqs: admitted requests, and the number of tokens that each has computed. prices: of the
        step. others: there is more than one prompt; the image then leaves the smallest chunk to
        prompts, and `finish` adds the rest of their budget. Returns the budget that is left.
        """
        self._prices, budget = prices, prices.budget
        opened = self._images.opened
        if opened is None:
            return budget
        image, key = opened.image, image_key(opened.image)
        needed = any(
            image_key(each) == key and each.start + self._limits.tokens(each.grid) > start
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
        return max(budget - self._advance(image, 0, self._limits.layers), self._least)

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
        return any(image_key(image) in self._parts for image in req.images)

    def limit(self, req: Req, start: int, end: int, budget: int) -> int:
        """Return the most tokens of a chunk. Remembers a request for `passed_over`.

        start, end: of the tokens of `req` that are left. budget: for the tokens and the images.
        """
        tokens, price, left = min(budget, end - start), 0, self._left
        for image, count, cost in self._new(req, start):
            before = max(image.start - start, 0)
            if before >= tokens:
                break
            may_exceed = before < self._least and not (self._divides or self._parts)
            taken = self._tokens(price + cost)
            # A chunk with tokens of the image continues to its smallest size.
            after = min(self._least, end - start - before) if self._divides else 0
            is_over = cost > 0 and taken + before + after > budget
            if count > left or (is_over and not may_exceed):
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
            tokens = min(tokens, max(budget - taken, least))
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
        most = self._within(budget - tokens)
        return tokens > 0 and not self._limits.layers_within(image.grid, most)

    def add(self, req: Req, start: int, tokens: int, budget: int) -> int:
        """Count the images of a chunk, and encode a part of the image after it.

        budget: the prompt tokens that the chunk leaves. Returns those that the images take.
        """
        taken = 0
        for image, count, cost in self._new(req, start):
            if max(image.start - start, 0) >= tokens:
                break
            if cost:
                taken += self._advance(image, 0, self._limits.layers)
            else:
                self._count(image, count)
        # Without decoding rows and without a chunk, it would take the budget of the first chunk.
        following = self._following(req, start, tokens) if tokens or self._divides else None
        if following is not None and following is not self._resumed:
            begins = not (tokens or self._resumed or image_key(following) in self._parts)
            taken += self._advance(following, budget - taken, least=int(begins))
        return taken

    def tokens(self, req: Req, start: int) -> int:
        """Return the prompt tokens that the images from token `start` on take."""
        return self._tokens(sum(price for _, _, price in self._new(req, start)))

    def _tokens(self, price: int) -> int:
        """Return the prompt tokens that further encodings of this price take."""
        return self._prices.tokens(self._price + price) - self._taken

    def _within(self, budget: int) -> int:
        """Return the highest price of further encodings that take these prompt tokens."""
        return self._prices.price(self._taken + budget) - self._price

    def _new(self, req: Req, start: int) -> Iterator[tuple[PromptImage, int, int]]:
        """Yield the images of `req` with tokens from `start` on.

        Each has the number of its rows that the plan has not counted, and the price of its layers
        that are left.
        """
        for image in req.images:
            count = self._limits.tokens(image.grid)
            if image.start + count > start:
                new = image_key(image) not in self._counted
                yield image, count * new, self._rest(image)

    def _rest(self, image: PromptImage) -> int:
        """Return the price of the layers that are left, 0 if the buffer has the image."""
        if self._images.has(image_key(image)):
            return 0
        price, begun = self._limits.price, self._begun(image)
        return price(image.grid) - price(image.grid, 0 if begun is None else begun.end)

    def _begun(self, image: PromptImage) -> EncodePart | None:
        """Return the newest layers of an image that this step or those before it compute."""
        part = self._parts.get(image_key(image), self._images.opened)
        return None if part is None or image_key(part.image) != image_key(image) else part

    def _following(self, req: Req, start: int, tokens: int) -> PromptImage | None:
        """Return the image right after a chunk, if the step may compute a part of its layers."""
        for image, _, cost in self._new(req, start):
            before = max(image.start - start, 0)
            if before >= tokens:
                free = self._opened in (None, image_key(image))
                return image if before == tokens and cost and free else None
        return None

    def _advance(self, image: PromptImage, budget: int, least: int = 0) -> int:
        """Compute the further layers of an image for which the budget has room.

        least: of these layers. The last layer also needs rows of the buffer. Returns the prompt
        tokens that they take.
        """
        limits, key, begun = self._limits, image_key(image), self._begun(image)
        first, state = (0, EncodingState()) if begun is None else (begun.end, begun.state)
        count, price = limits.tokens(image.grid), limits.price(image.grid, first)
        end = max(limits.layers_within(image.grid, price + self._within(budget)), first + least)
        end = min(end, limits.layers if count <= self._left else limits.layers - 1)
        if end <= first:
            return 0
        whole, in_step = limits.price(image.grid, end), self._parts.get(key)
        first = first if in_step is None else in_step.first
        seconds = self._prices.token_s * (whole - limits.price(image.grid, first))
        self._parts[key] = EncodePart(image, first, end, seconds, state)
        if end == limits.layers:
            self._count(image, count)
            self._opened = None if self._opened == key else self._opened
        else:
            self._opened = key
        taken = self._tokens(whole - price)
        self._price, self._taken = self._price + whole - price, self._taken + taken
        return taken

    def _count(self, image: PromptImage, count: int) -> None:
        """Reserve the rows of an image, which the step reads or writes."""
        self._counted.add(image_key(image))
        self._left -= count
