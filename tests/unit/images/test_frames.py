"""The frames of an animation are counted without a decoder."""

import struct
from typing import Any

import pytest

from minisgl.images.frames import has_too_many_frames

HEAD = b"GIF89a" + struct.pack("<HH", 1, 1) + b"\x80\0\0" + bytes(6)
CONTROL, COMMENT = b"\x21\xf9\x04\0\0\0\0\0", b"\x21\xfe\3gif\0"


class CountedReads(bytes):
    """A file that counts the bytes that are read of it."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def frame(flags: int = 0) -> bytes:
    """Return an image of a pixel. flags: 128 for a table of two colours."""
    colors = bytes(6) if flags else b""
    return b"\x2c\0\0\0\0\1\0\1\0" + bytes([flags]) + colors + b"\2\2\x44\1\0"


@pytest.mark.parametrize("before", [b"", CONTROL, COMMENT, COMMENT + CONTROL])
@pytest.mark.parametrize("flags", [0, 128])
def test_images_of_a_gif_are_counted_with_or_without_control_blocks(
    before: bytes, flags: int
) -> None:
    """Regression: a GIF of a million frames without control blocks was accepted."""
    one = before + frame(flags)
    assert not has_too_many_frames(HEAD + one * 10_000 + b"\x3b", "gif")
    assert has_too_many_frames(HEAD + one * 10_001 + b"\x3b", "gif")


def test_bytes_of_pixels_and_after_the_end_are_no_frames() -> None:
    pixels = b"\xff" + (frame() * 20)[:255]
    large = frame()[:11] + pixels * 1000 + b"\0"
    assert not has_too_many_frames(HEAD + large * 20 + b"\x3b" + frame() * 20_000, "gif")


@pytest.mark.parametrize("file", [b"", HEAD[:9], HEAD[:10], HEAD, HEAD + frame()[:7], HEAD + b"\1"])
def test_a_cut_gif_has_few_frames(file: bytes) -> None:
    assert not has_too_many_frames(file, "gif")


@pytest.mark.parametrize(
    ("begin", "rest"),
    [(HEAD, b"\x21\xfe\0"), (HEAD + frame()[:11], b"\1\5")],
    ids=["empty blocks", "short parts"],
)
def test_few_blocks_of_a_gif_are_read(begin: bytes, rest: bytes) -> None:
    file = CountedReads(begin + rest * 400_000)
    assert not has_too_many_frames(file, "gif")
    assert file.reads < 3 * 65_536 + 10  # of each block or part, at most three bytes
