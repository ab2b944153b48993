"""The check of the images of a request against the limits of the engine."""

import numpy as np
from numpy.typing import NDArray

from minisgl.core import InvalidRequest
from minisgl.core.batch import Int32Array
from minisgl.core.images import ImageLimits
from minisgl.message.messages import AddReq, PromptImage


def check_images(message: AddReq, tokens: Int32Array, limits: ImageLimits | None) -> None:
    """Raise InvalidRequest unless the negative ids of a prompt are those of its images.

    tokens: int32, the prompt. limits: of the engine.
    """
    images = message.images
    if limits is None and images:
        raise InvalidRequest(
            "this server takes no images: the model has no image encoder, or --no-images leaves it "
            "out; send text only",
            param="messages",
        )
    is_pad, counts = np.zeros(len(tokens), dtype=np.bool_), list[int]()
    if limits is not None:
        counts = [_tokens_of(image, limits, is_pad) for image in images]
    if not np.array_equal(is_pad, tokens < 0):
        raise InvalidRequest(
            "a token id is negative, but not of an image of the request", param="prompt"
        )
    if limits is not None and max(counts, default=0) > limits.most_tokens:
        raise InvalidRequest(
            f"an image has {max(counts)} tokens, and this server takes images of at most "
            f"{limits.most_tokens}, a third of --image-cache-tokens; send a smaller image",
            param="messages",
        )
    if images and message.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "log-probabilities of a prompt with images are not available; ask for those of the "
            "output only",
            param="prompt_logprobs",
        )


def _tokens_of(image: PromptImage, limits: ImageLimits, is_pad: NDArray[np.bool_]) -> int:
    """Mark the tokens of an image, and return their number. Raises InvalidRequest."""
    rows, columns = image.grid
    begin, count = image.start, limits.tokens(image.grid)
    inside = 0 <= begin < begin + count <= len(is_pad) and not is_pad[begin : begin + count].any()
    whole = min(image.grid) > 0 == rows % limits.merge == columns % limits.merge
    if not (inside and whole and image.num_bytes == 3 * limits.patch**2 * rows * columns):
        raise InvalidRequest(
            f"an image has a grid of {rows} x {columns} patches, {image.num_bytes} bytes and its "
            f"first token at {begin} of {len(is_pad)}; expected tokens of its own, each of "
            f"{limits.merge} x {limits.merge} patches, each of {limits.patch} x {limits.patch} "
            "pixels of 3 bytes",
            param="messages",
        )
    is_pad[begin : begin + count] = True
    return count
