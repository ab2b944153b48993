"""The parts of the content of a message: texts and images."""

from typing import Any, Literal, TypeAlias

import msgspec

from minisgl.protocol.body import RequestBody


class TextPart(RequestBody, kw_only=True, tag_field="type", tag="text", omit_defaults=True):
    """Text in the content of a message. `cache_control` is ignored."""

    text: str
    cache_control: Any = None


Detail: TypeAlias = Literal["auto", "low", "high", "original"]


class ImageUrl(RequestBody, kw_only=True):
    """A data URL: `data:image/png;base64,` and the file in Base64.

    detail: `low` resizes the image to at most 512 x 512 pixels. The others do not differ.
    """

    url: str
    detail: Detail = "auto"


class ImagePart(RequestBody, kw_only=True, tag_field="type", tag="image_url"):
    """An image in the content of a message. `cache_control` is ignored."""

    image_url: ImageUrl
    cache_control: Any = None


class PlacedImage(ImagePart, kw_only=True, tag_field="type", tag="image_url"):
    """An image of another API. path: its place in the body of the client."""

    path: str


class TemplateImage(msgspec.Struct, tag_field="type", tag="image"):
    """The place of an image, as chat templates expect it."""


Part: TypeAlias = TextPart | ImagePart
