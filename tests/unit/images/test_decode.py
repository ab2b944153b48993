"""Decoding of images: the pixels, and the files that are refused."""

import base64
import hashlib
import io
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from minisgl.core import ImageRefused
from minisgl.images import ImageDecoder, ImageSpec, decode

SPEC = ImageSpec(
    patch=16,
    merge=2,
    min_pixels=65_536,
    max_pixels=2**20,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    image_token=7,
)
LIMITS = {
    "max_pixels": 2**20,
    "max_tokens": 4096,
    "max_request_pixels": 2**24,
    "timeout_s": 60.0,
}


@pytest.fixture(scope="module")
def decoder():
    with closing(ImageDecoder(SPEC, **LIMITS)) as decoder:
        yield decoder


def picture(mode="RGB", size=(90, 60)):
    """An image with random values in all of its channels."""
    values = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


def file_of(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(decoder, file, kind="png", **options):
    """The pixels as an array [height, width, 3]."""
    found = decoder.decode(base64.b64encode(file), f"image/{kind}", **options)
    assert found.digest == hashlib.sha256(found.pixels).digest()
    return np.frombuffer(found.pixels, np.uint8).reshape(found.height, found.width, 3)


def processed(image, max_pixels=SPEC.max_pixels):
    """The pixels that the image processor of transformers gives to the encoder."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=SPEC.patch,
        merge_size=SPEC.merge,
        size={"shortest_edge": SPEC.min_pixels, "longest_edge": max_pixels},
        do_rescale=False,
        do_normalize=False,
    )
    given = processor(images=[image], return_tensors="np")
    _, rows, columns = given["image_grid_thw"][0]
    unit = (SPEC.merge, SPEC.merge, 3, 2, SPEC.patch, SPEC.patch)
    patches = given["pixel_values"].reshape(rows // 2, columns // 2, *unit)
    pixels = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return pixels.reshape(rows * SPEC.patch, columns * SPEC.patch, 3).astype(np.uint8)


@pytest.mark.parametrize(
    "size", [(90, 60), (1, 1), (1, 200), (256, 256), (1000, 700), (1023, 1025), (3000, 15)]
)
def test_pixels_equal_those_of_the_processor_of_transformers(decoder, size):
    image = picture(size=size)
    assert np.array_equal(decoded(decoder, file_of(image, "PNG")), processed(image))


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("L", "png", {}),
        ("LA", "png", {}),
        ("RGBA", "png", {}),
        ("P", "png", {"transparency": 3}),
        ("1", "png", {}),
        ("CMYK", "jpeg", {}),
        ("L", "jpeg", {}),
        ("RGB", "jpeg", {"progressive": True}),
        ("P", "gif", {"transparency": 3}),
        ("RGBA", "webp", {"lossless": True}),
    ],
)
def test_every_mode_of_a_file_is_decoded(decoder, mode, kind, options):
    file = file_of(picture(mode), kind, **options)
    expected = processed(Image.open(io.BytesIO(file)))
    assert np.array_equal(decoded(decoder, file, kind), expected)


@pytest.fixture(scope="module")
def square_decoder():
    """For the images of Gemma 3."""
    spec = msgspec.structs.replace(
        SPEC, patch=14, min_pixels=112**2, max_pixels=112**2, side=112, resample=2
    )
    with closing(ImageDecoder(spec, **LIMITS)) as decoder:
        yield decoder


@pytest.mark.parametrize("size", [(90, 60), (112, 112), (1, 190), (1000, 700)])
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "png"), ("L", "png"), ("CMYK", "jpeg"), ("RGBA", "png")]
)
def test_images_of_one_size_equal_those_of_gemma_3(square_decoder, size, mode, kind):
    file = file_of(picture(mode, size), kind)
    processor = Gemma3ImageProcessorPil(
        size={"height": 112, "width": 112}, do_rescale=False, do_normalize=False
    )
    expected = processor(Image.open(io.BytesIO(file)), return_tensors="np")["pixel_values"][0]
    found = decoded(square_decoder, file, kind, low=True)
    assert np.array_equal(found.transpose(2, 0, 1), expected)


def test_sixteen_bits_of_grey_keep_their_high_byte(decoder):
    values = np.arange(0, 65_536, 4, dtype=np.uint16).reshape(128, 128)
    found = decoded(decoder, file_of(Image.fromarray(values), "PNG"))
    expected = processed(Image.fromarray((values >> 8).astype(np.uint8)))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("size", [(90, 60), (256, 320)], ids=["resized", "kept"])
def test_orientation_is_applied(decoder, orientation, kind, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = file_of(picture(size=size), kind, exif=exif)
    expected = processed(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))
    assert np.array_equal(decoded(decoder, file, kind), expected)


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_first_frame_of_an_animation_is_decoded(decoder, kind):
    frames = [Image.new("RGB", (64, 64), color) for color in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "webp" else {}
    file = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(decoded(decoder, file, kind), processed(frames[0]))


def test_low_detail_has_at_most_512_x_512_pixels(decoder):
    image = picture(size=(1000, 700))
    found = decoded(decoder, file_of(image, "PNG"), low=True)
    assert np.array_equal(found, processed(image, 512 * 512))


def test_limit_on_tokens_resizes_further():
    image = picture(size=(1000, 700))
    with closing(ImageDecoder(SPEC, **{**LIMITS, "max_tokens": 100})) as decoder:
        found = decoded(decoder, file_of(image, "PNG"))
    assert np.array_equal(found, processed(image, 100 * 32 * 32))


@pytest.mark.parametrize("size", [(20, 4000), (4000, 20), (90, 60), (1, 1), (200, 1), (700, 500)])
@pytest.mark.parametrize("tokens", [64, 65, 100])
def test_resized_image_has_at_most_the_tokens_of_the_limit(size, tokens):
    """Regression: a narrow image had 141 tokens with a limit of 100, so the engine refused it."""
    height, width = decode.resized(*size, SPEC, tokens * SPEC.unit**2)
    assert height % SPEC.unit == width % SPEC.unit == 0
    assert 0 < height * width <= tokens * SPEC.unit**2


def test_base64_may_have_line_breaks(decoder):
    file = file_of(picture(), "PNG")
    found = decoder.decode(base64.encodebytes(file), "image/png")
    assert found.pixels == decoder.decode(base64.b64encode(file), "image/png").pixels


def png_of(width, height, pixels=bytes(10_000)):
    """A PNG file whose header has this size, by default with few pixels."""

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(pixels, 1)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def gif_of(frames):
    frame = b"\x21\xf9\x04\0\0\0\0\0\x2c\0\0\0\0\1\0\1\0\0\2\2\x44\1\0"
    head = b"GIF89a" + struct.pack("<HH", 1, 1) + b"\x80\0\0\0\0\0\xff\xff\xff"
    return head + frame * frames + b"\x3b"


@pytest.mark.parametrize(
    ("file", "kind", "reason", "limit"),
    [
        (png_of(100_000, 100_000), "png", "size", "max_image_pixels"),
        (png_of(1025, 1024), "png", "size", "max_image_pixels"),
        (png_of(1, 201), "png", "size", "max_image_aspect"),
        (gif_of(10_001), "gif", "size", "max_image_frames"),
        (png_of(1000, 1000), "png", "broken", None),
        (b"\x89PNG\r\n\x1a\nno chunk", "png", "broken", None),
        (b"<html>", "png", "format", None),
        (gif_of(1), "png", "format", None),
        (b"%PDF-1.7", "pdf", "format", None),
        (b"", "png", "format", None),
    ],
)
def test_file_is_refused_with_a_reason(decoder, file, kind, reason, limit):
    with pytest.raises(ImageRefused) as caught:
        decoder.decode(base64.b64encode(file), f"image/{kind}")
    assert (caught.value.reason, caught.value.limit) == (reason, limit)


def test_bombs_take_little_cpu_time(decoder):
    """A PNG of 30 GB of pixels, 600,000 frames, and a file of 16 MB that is no image."""
    bombs = [(png_of(100_000, 100_000), "png"), (gif_of(600_000), "gif"), (bytes(2**24), "png")]
    encoded = [(base64.b64encode(file), kind) for file, kind in bombs]
    processes = psutil.Process().children(recursive=True)

    def cpu_s():
        return time.process_time() + sum(sum(one.cpu_times()[:2]) for one in processes)

    before_s = cpu_s()
    for data, kind in encoded:
        with pytest.raises(ImageRefused):
            decoder.decode(data, f"image/{kind}")
    assert cpu_s() - before_s <= 1.0


def test_pixels_of_a_bomb_are_not_unpacked(decoder):
    """A PNG of 36 million pixels takes 144 MB. The most memory of the processes is measured."""
    side = 6000
    bomb = base64.b64encode(png_of(side, side, bytes((3 * side + 1) * side)))
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    before_kb = [_most_kb(pid, reset=True) for pid in pids]
    with pytest.raises(ImageRefused):
        decoder.decode(bomb, "image/png")
    after_kb = [_most_kb(pid) for pid in pids]
    assert max(b - a for a, b in zip(before_kb, after_kb, strict=True)) < 50_000


def _most_kb(pid, reset=False):
    """The most resident memory of a process. reset: measure from now on."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("data", [b"iVBORw0KGgo=#", b"iVBORw0KGgoA", b"\xff\xfe"])
def test_broken_base64_is_refused(decoder, data):
    with pytest.raises(ImageRefused):
        decoder.decode(data, "image/png")


@pytest.fixture(scope="module")
def large_png():
    return base64.b64encode(file_of(Image.new("RGB", (4000, 4000)), "PNG"))


def test_cpu_time_is_limited(large_png):
    limits = {**LIMITS, "max_pixels": 2**24, "timeout_s": 0.02}
    refusal = pytest.raises(ImageRefused, match=r"more than 0.02 s of CPU time")
    with closing(ImageDecoder(SPEC, **limits)) as decoder, refusal as caught:
        decoder.decode(large_png, "image/png")
    assert (caught.value.reason, caught.value.limit) == ("cost", "image_timeout_s")


DECODES_WITH_16_MIB = f"""
import sys
from minisgl.core import ImageRefused
from minisgl.images import ImageDecoder, ImageSpec, decode

decode._MEMORY_BYTES = 2**24
decoder = ImageDecoder({SPEC}, **{ {**LIMITS, "max_pixels": 2**24} })
try:
    decoder.decode(sys.stdin.buffer.read(), "image/png")
except ImageRefused as error:
    print(error.reason, error.limit, error.message)
"""


def test_memory_is_limited(large_png):
    # The limit counts additional memory. A new process has no memory that earlier tests have freed
    # and that the image could use.
    command = [sys.executable, "-c", DECODES_WITH_16_MIB]
    done = subprocess.run(command, input=large_png, capture_output=True, check=True)
    assert done.stdout.startswith(b"cost max_image_memory takes more than 16 MiB of memory")


def test_image_after_one_that_exceeds_a_limit_is_decoded(large_png):
    small = Image.new("RGB", (32, 32), "red")
    limits = {**LIMITS, "max_pixels": 2**24, "timeout_s": 0.02}
    with closing(ImageDecoder(SPEC, **limits)) as decoder:
        with pytest.raises(ImageRefused):
            decoder.decode(large_png, "image/png")
        assert np.array_equal(decoded(decoder, file_of(small, "PNG")), processed(small))


def test_no_other_call_begins_before_the_pixels_of_an_image_are_read():
    """Regression: the next call of another thread could overwrite the pixels."""

    class Watched:
        def __getitem__(self, part):
            with ThreadPoolExecutor(1) as other:
                assert not other.submit(lock.acquire, blocking=False).result()
            return shared[part]

    with closing(ImageDecoder(SPEC, **LIMITS)) as decoder:
        lock, shared, decoder._shared = decoder._process.lock, decoder._shared, Watched()
        image = picture(size=(512, 512))
        assert np.array_equal(decoded(decoder, file_of(image, "PNG")), processed(image))


@pytest.mark.parametrize("spent_s", [59.99, 60.0])
def test_images_of_a_request_share_the_cpu_time(large_png, spent_s):
    """Regression: each of eight images of a request had the whole time."""
    with closing(ImageDecoder(SPEC, **{**LIMITS, "max_pixels": 2**24})) as decoder:
        first = decoder.decode(large_png, "image/png")
        assert 0 < first.cpu_s < 60
        before = [msgspec.structs.replace(first, cpu_s=spent_s / 2)] * 2
        with pytest.raises(ImageRefused, match="more than 60 s of CPU time") as caught:
            decoder.decode(large_png, "image/png", before=before)
    assert caught.value.limit == "image_timeout_s"


def test_images_of_a_request_share_the_pixels():
    file = base64.b64encode(file_of(picture(size=(512, 512)), "PNG"))
    with closing(ImageDecoder(SPEC, **{**LIMITS, "max_request_pixels": 2 * 2**18})) as decoder:
        images = [decoder.decode(file, "image/png")]
        images.append(decoder.decode(file, "image/png", before=images))
        with pytest.raises(ImageRefused, match="786432 pixels") as caught:
            decoder.decode(file, "image/png", before=images)
    assert (caught.value.reason, caught.value.limit) == ("size", "max_request_pixels")
