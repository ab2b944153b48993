"""The images in TokenizeChat, TokenizeResult and AddReq."""

import msgspec


class SourceImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image file of a request.

    data        the file in Base64.
    media_type  that the client declares, such as image/png.
    low         resize the image to a low resolution.
    path        its place in the body of the client, for errors.
    """

    data: bytes
    media_type: str
    low: bool = False
    path: str = ""


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a prompt, resized for the model.

    start   index of its first pad in the ids of the prompt. A pad is a negative id, and an image
            has one for each token: rows * columns / merge^2 of its grid (images.ImageSpec).
    grid    rows and columns of patches.
    digest  SHA-256 of the pixels.
    pixels  uint8 [rows * patch, columns * patch, 3], red, green and blue. Empty in the copies for
            ranks that encode no images; `omitted` is then the number of bytes.
    """

    start: int
    grid: tuple[int, int]
    digest: bytes
    pixels: bytes
    omitted: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the pixels, also if they are omitted."""
        return self.omitted or len(self.pixels)

    def without_pixels(self) -> "PromptImage":
        """Return a copy for a rank that encodes no images."""
        return msgspec.structs.replace(self, pixels=b"", omitted=self.num_bytes)
