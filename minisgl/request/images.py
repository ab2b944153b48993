"""Images in the messages of a chat: their files, and their number."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from minisgl.core import ImageRefused, ModelFacts
from minisgl.message.messages import SourceImage, TokenizeChat
from minisgl.protocol.content import ImagePart, PlacedImage

Prompts: TypeAlias = tuple[tuple[str, Any], ...]  # of a CallRequest
_SCHEME = "data:"
_HEAD_CHARS = 128  # of a data URL before its comma: a media type and the encoding
_EXPECTED = "expected a data URL with the image itself, data:image/png;base64,..."


def file_refused(path: str) -> ImageRefused:
    """The error for an image that is the id of a stored file."""
    text = f"{path} is the id of a file, and the server stores no files; {_EXPECTED}"
    return ImageRefused(text, "source", path)


def source_image(part: ImagePart, path: str) -> SourceImage:
    """The file in the data URL of an image part. Raises ImageRefused.

    path: of the part in a chat. An image of another API has its own. Only the head of the URL is
    divided: a URL of 20 MiB may have 20 million separators.
    """
    if isinstance(part, PlacedImage):
        path = part.path
    url = part.image_url.url
    if url[: len(_SCHEME)].lower() != _SCHEME:
        text = f"{path} is no data URL, and the server fetches nothing; {_EXPECTED}"
        raise ImageRefused(text, "source", path)
    head, comma, _ = url[:_HEAD_CHARS].partition(",")
    data = url[len(head) + 1 :] if comma else ""
    media_type, _, parameters = head[len(_SCHEME) :].partition(";")
    encoding = parameters.rpartition(";")[2]
    if not comma or encoding.lower() != "base64" or not data.isascii():
        raise ImageRefused(f"{path} is no data URL in Base64; {_EXPECTED}", "broken", path)
    low = part.image_url.detail == "low"
    return SourceImage(data=data.encode("ascii"), media_type=media_type, low=low, path=path)


def check_source_images(images: Sequence[SourceImage], facts: ModelFacts, max_images: int) -> None:
    """Raise ImageRefused if the server does not accept so many images."""
    if not images:
        return
    path = images[0].path
    if not facts.images:
        text = f"{path} is an image, and the served model computes no images; send text only"
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
