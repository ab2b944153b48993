"""The images of a chat: their pixels, and their places in the ids of the prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from minisgl.core import ImageRefused
from minisgl.images import DecodedImage, ImageDecoder, ImageSpec, pad_ids
from minisgl.message.messages import PromptImage, SourceImage
from minisgl.tokenizer.renderer import TemplateError


class PlacedImages(NamedTuple):
    """The ids of a prompt with images.

    ids     with the image token of the model for each token of an image.
    padded  with the pads of the images in these places.
    """

    ids: list[int]
    padded: list[int]
    images: tuple[PromptImage, ...]


def decode_images(
    images: Sequence[SourceImage], ids: list[int], decoder: ImageDecoder
) -> PlacedImages:
    """Decode the images of a chat. ids: of the chat, with one image token for each image.

    Raises ImageRefused for an image that cannot be decoded, and TemplateError if the ids have not
    one token for each image.
    """
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
