"""The ids of an image in a prompt.

The prefix cache, the salts of requests and the KV events compare token ids. Each pad of an image
therefore has an id that depends on all pixels: equal images share cached pages, and two images that
differ in one pixel share none.
"""

import hashlib
import struct

_BITS = 30


def pad_ids(digest: bytes, grid: tuple[int, int], count: int) -> list[int]:
    """Return the ids of the `count` pads of an image. They are below -1, and fit into int32.

    digest: of the pixels. grid: rows and columns of patches.
    """
    words = hashlib.shake_256(digest + struct.pack("<II", *grid)).digest(4 * count)
    return [-2 - (word >> (32 - _BITS)) for word in struct.unpack(f"<{count}I", words)]
