"""The images in the conversations of an LLM."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from minisgl.core import ImageRefused
from minisgl.llm.images import with_data_urls


def picture() -> Image.Image:
    return Image.new("RGB", (3, 2), "red")


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def read_back(given: Any) -> tuple[str, Image.Image]:
    """The media type and the image in the data URL of an image part."""
    (message,) = with_data_urls([{"role": "user", "content": [{"type": "image", "image": given}]}])
    (part,) = message["content"]
    head, _, data = part["image_url"]["url"].partition(";base64,")
    assert part["type"] == "image_url"
    return head, Image.open(io.BytesIO(base64.b64decode(data)))


def test_image_is_a_path_bytes_or_an_image_of_pil(tmp_path: Path) -> None:
    path = tmp_path / "a.webp"
    path.write_bytes(file_of(picture(), "WEBP", lossless=True))
    cases = [
        (path, "data:image/webp"),
        (str(path), "data:image/webp"),
        (file_of(picture(), "GIF"), "data:image/gif"),
        (bytearray(file_of(picture())), "data:image/png"),
        (picture(), "data:image/png"),
        (picture().convert("CMYK"), "data:image/png"),
    ]
    for given, head in cases:
        found_head, found = read_back(given)
        assert found_head == head
        assert found.convert("RGB").tobytes() == b"\xff\0\0" * 6


def test_image_of_pil_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(file_of(picture(), "JPEG", exif=exif)))
    assert read_back(turned)[1].size == (2, 3)


def test_other_messages_stay_as_they_are() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": ["b", url]}]
    assert with_data_urls(chat) == chat


@pytest.mark.parametrize("given", ["/no/such/file.png", b"text", 5, None])
def test_other_values_are_refused_with_their_place(given: Any) -> None:
    with pytest.raises(ImageRefused, match=r"messages\[0\].content\[0\].image"):
        read_back(given)
