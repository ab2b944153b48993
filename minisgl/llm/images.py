"""The images of the conversations of an LLM."""

import io
from base64 import b64encode
from os import PathLike
from pathlib import Path
from typing import Any

from minisgl.core import ImageRefused
from minisgl.images import file_kind

_EXPECTED = "a path, bytes or an image of PIL"


def with_data_urls(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which each image part has a data URL, as the server expects it.

    An image part is {"type": "image", "image": X}, where X is a path, the bytes of a file, or an
    image of PIL. Raises ImageRefused.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(chat)]


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    content = [_part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]
    return {**message, "content": content}


def _part(part: Any, path: str) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image":
        return part
    file = _file(part.get("image"), path)
    kind = file_kind(file)
    if kind is None:
        raise ImageRefused(f"{path}.image is no PNG, JPEG, WEBP or GIF file", "format", path)
    url = f"data:image/{kind};base64,{b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _file(image: Any, path: str) -> bytes:
    from PIL import Image, ImageOps  # slow to import, not always needed

    match image:
        case str() | PathLike():
            try:
                return Path(image).read_bytes()
            except OSError as error:
                text = f"{path}.image cannot be read: {error}; expected {_EXPECTED}"
                raise ImageRefused(text, "source", path) from None
        case bytes() | bytearray() | memoryview():
            return bytes(image)
        case Image.Image():
            upright = ImageOps.exif_transpose(image)
            if upright.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
                upright = upright.convert("RGB")
            buffer = io.BytesIO()
            upright.save(buffer, "PNG", compress_level=0)
            return buffer.getvalue()
    text = f"{path}.image is {type(image).__name__}; expected {_EXPECTED}"
    raise ImageRefused(text, "source", path)
