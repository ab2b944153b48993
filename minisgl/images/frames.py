"""The number of frames of an animation, counted before a decoder reads the file."""

MAX_FRAMES = 10_000
_MAX_PARTS = 2**16  # of a GIF that are counted: a large GIF of one frame has more
# Bytes that stand before each frame of an animation.
_MARKS = {"png": b"fcTL", "webp": b"ANMF"}
# The first byte of a block of a GIF.
_IMAGE, _EXTENSION = 0x2C, 0x21


def has_too_many_frames(file: bytes, kind: str) -> bool:
    """Return whether a file has more than MAX_FRAMES frames. It may be cut, and be broken.

    kind: as file_kind returns it.
    """
    if kind == "gif":
        return _gif_frames(file) > MAX_FRAMES
    return kind in _MARKS and file.count(_MARKS[kind]) > MAX_FRAMES


def _gif_frames(file: bytes) -> int:
    """Count the images at the beginning of a GIF.

    The blocks of control data are no measure: an image need not have one. A block consists of parts
    with a length each, and ends with a part of no length.
    """
    if len(file) < 13:
        return 0
    at, frames, parts = 13 + _colors(file[10]), 0, 0
    while at + 10 < len(file) and frames <= MAX_FRAMES and parts < _MAX_PARTS:
        parts += 1
        if file[at] == _IMAGE:
            frames += 1
            at += 11 + _colors(file[at + 9])
        elif file[at] == _EXTENSION:
            at += 2
        else:
            break
        while at < len(file) and (length := file[at]) and parts < _MAX_PARTS:
            at += 1 + length
            parts += 1
        at += 1
    return frames


def _colors(flags: int) -> int:
    """Return the bytes of the table of colours that follows a header with these flags."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
