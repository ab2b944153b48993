"""The images of a chat: their pixels, and their places in the ids of the prompt."""

import array
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from minisgl.core import ImageRefused
from minisgl.images import DecodedImage, ImageDecoder, ImageSpec, pad_ids
from minisgl.message.messages import (
    PromptImage,
    SourceImage,
    TokenizeChat,
    TokenizeRequest,
    TokenizeResult,
)
from minisgl.tokenizer.renderer import TemplateError


class PlacedImages(NamedTuple):
    """The ids of a prompt with images.

    ids     with the image token of the model for each token of an image.
    padded  with the pads of the images in these places.
    """

    ids: list[int]
    padded: list[int]
    images: tuple[PromptImage, ...]


def packed(ids: list[int]) -> bytes:
    """Return ids as in TokenizeResult."""
    return array.array("i", ids).tobytes()


def images_of(message: TokenizeRequest) -> Sequence[SourceImage]:
    """The images of a message: those of a chat."""
    return message.images if isinstance(message, TokenizeChat) else ()


def with_images(
    result: TokenizeResult, images: Sequence[SourceImage], decoder: ImageDecoder | None
) -> TokenizeResult:
    """Return the result of a chat with its images.

    result: of the chat, with one image token for each image. decoder: of a model with images.

    Raises ImageRefused for an image that cannot be decoded, and TemplateError if the ids have not
    one token for each image.
    """
    assert decoder is not None, (
        "the server accepts no image without an image encoder; this is a bug"
    )
    started_s = time.perf_counter()
    ids = array.array("i", result.token_ids).tolist()
    placed = _decode_all(images, ids, decoder)
    stable, first = result.prefixes  # the generation prompt, behind `stable`, has no image
    added = len(placed.ids) - len(ids) if stable else 0
    return msgspec.structs.replace(
        result,
        token_ids=packed(placed.ids),
        prefixes=(stable + added, first),
        images=placed.images,
        padded=packed(placed.padded),
        decode_s=time.perf_counter() - started_s,
    )


def _decode_all(
    images: Sequence[SourceImage], ids: list[int], decoder: ImageDecoder
) -> PlacedImages:
    """Decode the images, and place them in the ids."""
    rendered = ids.count(decoder.spec.image_token)
    if rendered != len(images):
        raise TemplateError(
            f"the chat template renders {rendered} of the {len(images)} images of this chat"
        )
    decoded: list[DecodedImage] = []
    for image in images:
        decoded.append(_decode(image, decoder, decoded))
    return _place(decoded, ids, decoder.spec)


def _decode(
    image: SourceImage, decoder: ImageDecoder, before: Sequence[DecodedImage]
) -> DecodedImage:
    """Decode an image. before: those of the chat before it. Raises ImageRefused."""
    try:
        return decoder.decode(image.data, image.media_type, image.low, before)
    except ImageRefused as error:
        text = f"{image.path}: the image {error.message}"
        raise ImageRefused(text, error.reason, image.path, error.limit) from None


def _place(images: Sequence[DecodedImage], ids: list[int], spec: ImageSpec) -> PlacedImages:
    plain, padded, placed, start = list[int](), list[int](), list[PromptImage](), 0
    for image in images:
        end = ids.index(spec.image_token, start)
        plain += ids[start:end]
        padded += ids[start:end]
        grid = image.height // spec.patch, image.width // spec.patch
        placed.append(
            PromptImage(start=len(plain), grid=grid, digest=image.digest, pixels=image.pixels)
        )
        count = grid[0] * grid[1] // spec.merge**2
        plain += [spec.image_token] * count
        padded += pad_ids(image.digest, grid, count)
        start = end + 1
    return PlacedImages(plain + ids[start:], padded + ids[start:], tuple(placed))
