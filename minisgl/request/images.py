"""Images in the messages of a chat: their files, and their number."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from minisgl.core import ImageRefused, ModelFacts
from minisgl.message.messages import SourceImage, TokenizeChat
from minisgl.protocol import content

Prompts: TypeAlias = tuple[tuple[str, Any], ...]  # of a CallRequest
_NO_FETCHING = "send the image itself as a data URL, data:image/png;base64,...: the server fetches"


def file_refused(path: str) -> ImageRefused:
    """The error for an image that is the id of a stored file."""
    return ImageRefused(f"{path}: {_NO_FETCHING} no stored file", "source", path)


def source_image(part: content.ImagePart, path: str) -> SourceImage:
    """The file in the data URL of an image part. Raises ImageRefused.

    path: of the part in a chat. An image of another API has its own.
    """
    if isinstance(part, content.PlacedImage):
        path = part.path
    head, _, data = part.image_url.url.partition(",")
    scheme, _, kind = head.partition(":")
    media_type, *_, encoding = kind.split(";") if ";" in kind else (kind, "")
    if scheme.lower() != "data":
        raise ImageRefused(f"{path}: {_NO_FETCHING} no URL", "source", path)
    if encoding.lower() != "base64" or not data.isascii():
        text = f"{path} must be a data URL in Base64, such as data:image/png;base64,..."
        raise ImageRefused(text, "broken", path)
    low = part.image_url.detail == "low"
    return SourceImage(data=data.encode("ascii"), media_type=media_type, low=low, path=path)


def check_images(images: Sequence[SourceImage], facts: ModelFacts, max_images: int) -> None:
    """Raise ImageRefused if the server does not accept so many images."""
    if not images:
        return
    path = images[0].path
    if not facts.images:
        text = f"{path}: this server computes no images for this model; send text only"
        raise ImageRefused(text, "model", path)
    if len(images) > max_images:
        path = images[max_images].path
        text = f"{path}: the request has {len(images)} images; at most {max_images} are accepted"
        raise ImageRefused(text, "count", path, "max_images")


def without_files(prompts: Prompts) -> Prompts:
    """Return prompts without the files of their images, which a tokenizer has decoded."""
    return tuple([(name, _without_files(prompt)) for name, prompt in prompts])


def _without_files(prompt: Any) -> Any:
    has_files = isinstance(prompt, TokenizeChat) and prompt.images
    return msgspec.structs.replace(prompt, images=()) if has_files else prompt
