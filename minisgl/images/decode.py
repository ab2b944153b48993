"""`ImageDecoder`: decodes and resizes images, with limits on CPU time and memory.

A decoder of images is a library in C that reads data of a client. A file of some KB may unpack to
gigabytes or take minutes, and a fault of the library may end its process. The decoding therefore
runs in a bounded process. The size in the header is checked before any pixel is decoded. The
pixels return in memory that both processes share: two pipes would take several times the decoding.
"""

import binascii
import hashlib
import io
import math
import mmap
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from minisgl.core.errors import ImageRefused
from minisgl.images.frames import MAX_FRAMES, has_too_many_frames
from minisgl.images.spec import CHANNELS, ImageSpec
from minisgl.utils.bounded import BoundedProcess, Bounds
from minisgl.utils.supervise import describe_exit

MAX_ASPECT = 200  # of the longer to the shorter side, as in the processor of Qwen-VL
LOW_PIXELS = 512 * 512  # of an image with the detail `low`
_MEMORY_BYTES = 2**30
_BLOCKED_S = 60.0  # for waiting in one call, as for a disk
_LARGE_BYTES = 2**22  # The frames at the beginning of a larger file are counted first.
_NAME = "the process for images"
_KINDS = {"image/png": "png", "image/jpeg": "jpeg", "image/jpg": "jpeg"}
_KINDS |= {"image/webp": "webp", "image/gif": "gif"}
# The first bytes of each kind of file. A WEBP file has its size between "RIFF" and "WEBP".
_BEGINNINGS = {
    "png": (b"\x89PNG\r\n\x1a\n",),
    "jpeg": (b"\xff\xd8\xff",),
    "gif": (b"GIF87a", b"GIF89a"),
}


class DecodedImage(msgspec.Struct, frozen=True):
    """An image that is resized for the model.

    pixels         uint8 [height, width, 3], red, green and blue.
    height, width  multiples of ImageSpec.unit.
    digest         SHA-256 of the pixels.
    cpu_s          the CPU time of the decoding.
    """

    pixels: bytes
    height: int
    width: int
    digest: bytes
    cpu_s: float


class _Refusal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The fields of an ImageRefused."""

    message: str
    reason: str
    limit: str | None = None


class _Decoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The fields of a DecodedImage without its pixels, which are in the shared memory."""

    height: int
    width: int
    digest: bytes
    cpu_s: float


class ImageDecoder:
    """Decodes images for one model in a process of its own, one after the other."""

    def __init__(
        self,
        spec: ImageSpec,
        max_pixels: int,
        max_tokens: int,
        max_request_pixels: int,
        timeout_s: float,
    ) -> None:
        """Fork the process.

        max_pixels: of an image that is accepted. max_tokens: larger images are resized to so many.
        max_request_pixels: of all images of a request, after they have been resized. timeout_s: the
        CPU time for all images of a request.
        """
        self.spec = spec
        self._max_request_pixels = max_request_pixels
        self._timeout_s = timeout_s
        most = max(spec.min_pixels, min(spec.max_pixels, max_tokens * spec.unit**2))
        self._shared = mmap.mmap(-1, CHANNELS * most)  # the pixels of the newest image
        handle = _handler(spec, max_pixels, most, self._shared)
        wall_s = _BLOCKED_S + 10 * timeout_s  # a busy machine may give it a tenth of a core
        bounds = Bounds(timeout_s, _MEMORY_BYTES, wall_s=wall_s)
        self._process = BoundedProcess(_NAME, handle, bounds)

    def decode(
        self,
        data: bytes,
        media_type: str,
        low: bool = False,
        before: Sequence[DecodedImage] = (),
    ) -> DecodedImage:
        """Decode the Base64 text `data` of a file of this media type.

        low: resize the image to at most LOW_PIXELS. before: the images of the same request that
        have been decoded. Raises ImageRefused.
        """
        kind = _kind(data, media_type)
        left_s = self._timeout_s - sum(image.cpu_s for image in before)
        if left_s <= 0:
            raise self._ended(signal.SIGPROF)
        found = self._call(msgspec.msgpack.encode((data, kind, low, left_s)))
        if isinstance(found, _Refusal):
            raise ImageRefused(found.message, found.reason, limit=found.limit)
        pixels = sum(image.height * image.width for image in (*before, found))
        if pixels > self._max_request_pixels:
            text = (
                f"and those before it have {pixels} pixels, as resized for the model; at most "
                f"{self._max_request_pixels} are accepted; send fewer or smaller images"
            )
            raise ImageRefused(text, "size", limit="max_request_pixels")
        return found

    def _call(self, request: bytes) -> DecodedImage | _Refusal:
        """Return the image or the refusal of the process. Raises ImageRefused for a call that ends.

        The next call overwrites the shared memory, so the lock also covers the read.
        """
        with self._process.lock:
            reply = self._process.call(request)
            if isinstance(reply, signal.Signals):
                raise self._ended(reply)
            found: _Refusal | _Decoded = msgspec.msgpack.decode(reply, type=_Refusal | _Decoded)
            if isinstance(found, _Refusal):
                return found
            pixels = self._shared[: CHANNELS * found.height * found.width]
        return DecodedImage(pixels, found.height, found.width, found.digest, found.cpu_s)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._process.close()

    def _ended(self, by: signal.Signals) -> Exception:
        """The error of a call that this signal has ended."""
        match by:
            case signal.SIGPROF:
                text = (
                    f"and those before it take more than {self._timeout_s:g} s of CPU time to "
                    "decode; send fewer or smaller images"
                )
                return ImageRefused(text, "cost", limit="image_timeout_s")
            case signal.SIGABRT:
                text = f"takes more than {_MEMORY_BYTES >> 20} MiB of memory to decode"
                return ImageRefused(text, "cost", limit="max_image_memory")
            case signal.SIGSEGV:
                return ImageRefused("cannot be decoded: the file is broken", "broken")
        # The cause is not the image, for example a machine without memory.
        return ChildProcessError(f"{_NAME} {describe_exit(-by)}")


def resized(height: int, width: int, spec: ImageSpec, max_pixels: int) -> tuple[int, int]:
    """Return height and width of a resized image: spec.side, or as the processor of Qwen-VL.

    Without spec.side, both are multiples of spec.unit. Their product is at most max_pixels, which
    is at least spec.min_pixels. It is at least spec.min_pixels where a multiple allows it. Their
    ratio changes as little as possible, except that the longer side of a narrow image may be cut
    shorter: the rule of Qwen-VL makes images of more than max_pixels from some of them.
    """
    if spec.side is not None:
        return spec.side, spec.side
    unit = spec.unit
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    if new_height * new_width < spec.min_pixels:
        beta = math.sqrt(spec.min_pixels / (height * width))
        new_height = math.ceil(height * beta / unit) * unit
        new_width = math.ceil(width * beta / unit) * unit
    if new_height * new_width > max_pixels:
        beta, longest = math.sqrt(height * width / max_pixels), max_pixels // unit**2 * unit
        new_height = min(max(unit, math.floor(height / beta / unit) * unit), longest)
        new_width = min(max(unit, math.floor(width / beta / unit) * unit), longest)
    return new_height, new_width


def file_kind(file: bytes) -> str | None:
    """The kind of an image file by its first bytes: png, jpeg, gif, webp; None: none of them."""
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP":
        return "webp"
    return next((kind for kind, starts in _BEGINNINGS.items() if file.startswith(starts)), None)


def _handler(
    spec: ImageSpec, max_pixels: int, most: int, shared: mmap.mmap
) -> Callable[[bytes], bytes]:
    """Return the function of the process. Pillow is loaded here, before the fork.

    most: pixels of a resized image. shared: memory that gets these pixels.
    """
    from PIL import (
        GifImagePlugin,
        Image,
        ImageOps,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )
    from PIL import TiffImagePlugin as TiffImagePlugin  # reads the orientation

    readers: dict[str, Callable[[io.BytesIO], Image.Image]] = {
        "png": PngImagePlugin.PngImageFile,
        "jpeg": JpegImagePlugin.JpegImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
    }

    def decoded(file: bytes, kind: str, low: bool, started_s: float) -> _Decoded:
        image = readers[kind](io.BytesIO(file))
        _check_size(image.width, image.height, max_pixels)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode == "I;16":  # `convert` would cut all values above 255
            image = Image.frombytes("L", image.size, image.tobytes()[1::2])
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        wanted = max(spec.min_pixels, min(most, LOW_PIXELS)) if low else most
        height, width = resized(image.height, image.width, spec, wanted)
        # Pillow copies an image that has the mode or the size already.
        if image.mode != "RGB":
            image = image.convert("RGB")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling(spec.resample))
        pixels = image.tobytes()
        digest = hashlib.sha256(pixels).digest()
        shared[: len(pixels)] = pixels
        return _Decoded(height, width, digest, time.process_time() - started_s)

    def handle(request: bytes) -> bytes:
        started_s = time.process_time()
        data, kind, low, left_s = msgspec.msgpack.decode(
            request, type=tuple[bytes, str, bool, float]
        )
        # Shorter than the time in the bounds of the process if the request has other images.
        signal.setitimer(signal.ITIMER_PROF, left_s)
        reply: _Refusal | _Decoded
        try:
            reply = decoded(_file(data, kind), kind, low, started_s)
        except ImageRefused as error:
            reply = _Refusal(error.message, error.reason, error.limit)
        except MemoryError:  # a limit of the process, which ends
            raise
        # Pillow raises errors of many classes for data that it cannot read.
        except Exception as error:  # noqa: BLE001
            reply = _Refusal(f"cannot be decoded: {str(error)[:200]}", "broken")
        return msgspec.msgpack.encode(reply)

    return handle


def _kind(data: bytes, media_type: str) -> str:
    """The kind of a file, by its first bytes. data: in Base64.

    Raises ImageRefused for another kind than the media type says.
    """
    known = "image/png, image/jpeg, image/webp or image/gif"
    declared = _KINDS.get(media_type.lower())
    if declared is None:
        raise ImageRefused(f"must be {known}, not {media_type[:64]!r}", "format")
    found = file_kind(_from_base64(data[:64], strict=False))
    if found is None:
        raise ImageRefused(f"is not an image of the types {known}", "format")
    if found != declared:
        raise ImageRefused(f"has the media type {media_type}, and is a {found} file", "format")
    if len(data) > _LARGE_BYTES:  # Base64 of 20 MB takes 70 ms
        _check_frames(_from_base64(data[: _LARGE_BYTES // 4], strict=False), found)
    return found


def _file(data: bytes, kind: str) -> bytes:
    """The bytes of a file in Base64, which may have line breaks."""
    joined = data.translate(None, b"\r\n") if b"\n" in data else data
    file = _from_base64(joined, strict=True)
    _check_frames(file, kind)
    return file


def _check_frames(file: bytes, kind: str) -> None:
    if has_too_many_frames(file, kind):
        text = f"has more than {MAX_FRAMES} frames; send one of them"
        raise ImageRefused(text, "size", limit="max_image_frames")


def _from_base64(data: bytes, strict: bool) -> bytes:
    try:
        return binascii.a2b_base64(data, strict_mode=strict)
    except binascii.Error as error:
        raise ImageRefused(f"is not valid Base64: {error}", "broken") from None


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        text = f"has {width} x {height} pixels; at most {max_pixels} are accepted; send it smaller"
        raise ImageRefused(text, "size", limit="max_image_pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        text = f"has {width} x {height} pixels, a ratio of more than {MAX_ASPECT}; cut it"
        raise ImageRefused(text, "size", limit="max_image_aspect")
