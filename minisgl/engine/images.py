"""The image buffer of an engine, and the stage that encodes the images of a step into it."""

from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import ConfigError, EngineConfig
from minisgl.core.batch import Batch
from minisgl.core.images import EncodeImage, EncodingState, ImageLimits, ImageSpan
from minisgl.distributed.comm import TPInfo
from minisgl.engine.logits_processing import upload
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.stages import Stage
from minisgl.engine.step_tensors import StepTensors
from minisgl.images import image_spec
from minisgl.layers.images import MixedAngles
from minisgl.models.decoder import CausalLM
from minisgl.models.encoder import Encoding, ImageEncoder
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec

# An H200 computes about this many operations while the host queues the kernels of an encoder layer:
# 0.43 ms at 686 TFLOP/s.
_LAUNCH_FLOPS = 3e11
# An operation of an encoder takes this many times as long on an H200 as one of the layers in a step
# of many tokens: 1.8 times its time at 686 TFLOP/s, against 1.24 times. The image of the first
# figure has 1,024 x 1,024 pixels.
_GPU_FACTOR = 1.45


def image_limits(
    config: EngineConfig, model: ModelSpec, tp: TPInfo, device: torch.device
) -> ImageLimits | None:
    """Return the limits of an engine that takes images; None for a model without an encoder.

    A step computes the encoder on rank 0, and its layers on all ranks together. Raises ConfigError
    if all images have one size and the buffer is too small for it.
    """
    encoder, processing = model.encoder, image_spec(config.model_path)
    if encoder is None or processing is None:
        return None
    on_gpu, token_flops = device.type == "cuda", _token_flops(model) / tp.size
    one, two = encoder.flops((1, 1)) / token_flops, encoder.flops((2, 1)) / token_flops
    pair = (two - 2 * one) / 2  # flops(n patches) is n * a + n * n * b
    factor = _GPU_FACTOR if on_gpu else 1.0
    limits = ImageLimits(
        rows=config.image_cache_tokens,
        patch=encoder.patch,
        merge=encoder.merge,
        token=processing.image_token,
        patch_price=factor * (one - pair),
        pair_price=factor * pair,
        layers=encoder.depth,
        layer_price=_LAUNCH_FLOPS / token_flops if on_gpu else 0.0,
        mixed=encoder.sections is not None,
        mutual=encoder.mutual,
        grid=(encoder.side, encoder.side) if encoder.fixed else None,
    )
    tokens = 0 if limits.grid is None else limits.tokens(limits.grid)
    if tokens > limits.most_tokens:
        raise ConfigError(
            f"--image-cache-tokens is {limits.rows}, but each image of this model has {tokens} "
            f"tokens: expected at least {3 * tokens}, the tokens of three images; raise the flag, "
            "or leave the images out with --no-images"
        )
    return limits


def buffer_bytes(config: EngineConfig, model: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of the image buffer of rank 0; 0 without an image encoder."""
    width = 0 if model.encoder is None else model.encoder.width
    return config.image_cache_tokens * width * dtype.itemsize


def _token_flops(model: ModelSpec) -> int:
    """Return the floating-point operations of all layers for a token, without attention."""
    size, weights = model.hidden_size, 0
    for mixer, mlp, *_ in model.layers:
        weights += mixer.weights(size)
        if isinstance(mlp, ExpertsSpec):
            weights += (mlp.products + 1) * size * mlp.inner * (mlp.top_k + mlp.shared)
        elif mlp is not None:
            weights += (mlp.activation.products + 1) * size * mlp.inner
    return 2 * weights


def image_buffer(model: CausalLM, limits: ImageLimits | None) -> Tensor | None:
    """Allocate the features of image tokens, [rows, width], which the embedding reads.

    Returns None on a rank without the encoder. The embedding and DeepStack add to a sum over the
    ranks, so the features of one rank suffice.
    """
    embedding, encoder = model.model.embed_tokens, model.config.encoder
    if limits is None or encoder is None or model.encoder is None:
        return None
    buffer = embedding.weight.new_zeros((limits.rows, encoder.width))
    embedding.images = buffer[:, : encoder.size]
    return buffer


def image_stages(runner: ModelRunner) -> list[Stage]:
    """Return the stage of a rank that encodes images; none for another rank or engine."""
    encoder, buffer = runner.model.encoder, runner.images
    return [] if encoder is None or buffer is None else [EncodeImages(encoder, buffer)]


class EncodeImages(Stage):
    """Encodes the images of a step into the image buffer, before the layers of the step."""

    def __init__(self, encoder: ImageEncoder, buffer: Tensor) -> None:
        self._encoder, self._buffer = encoder, buffer

    def before(self, x: StepTensors) -> None:
        for image in x.batch.images:
            if image.first == 0:
                self._encode(image, self._begin(image))
            else:
                assert image.state.value is not None, "no step has begun the image; this is a bug"
                self._encode(image, image.state.take())

    def _encode(self, image: EncodeImage, encoding: Encoding) -> None:
        """Compute a part of an image, and keep it or write its rows.

        No caller holds the encoding, so its memory is free before the next image begins.
        """
        encoding = self._encoder.advance(encoding, image.first, image.end)
        if image.end < self._encoder.spec.depth:
            image.state.value = encoding
            return
        rows = upload({"rows": image.rows}, self._buffer.device)["rows"]
        self._buffer.index_copy_(0, rows.long(), self._encoder.finish(encoding))

    def _begin(self, image: EncodeImage) -> Encoding:
        height, width = (size * self._encoder.spec.patch for size in image.grid)
        pixels: NDArray[Any] = np.frombuffer(image.pixels, dtype=np.uint8)
        sent = upload({"pixels": pixels}, self._buffer.device)["pixels"]
        return self._encoder.begin(sent.view(height, width, 3))


def with_largest_image(batch: Batch, limits: ImageLimits | None) -> list[Batch]:
    """Return two batches that encode a large image in halves; without images, the batch alone.

    The image consists of zeros and has about the most tokens that an image may have. The first
    batch runs half of the encoder's layers, and keeps their output in memory while it computes the
    layers of the language model. If the tokens of an image attend in both directions, the last
    chunk of the batch ends with an image.
    """
    if limits is None:
        return [batch]
    side = max(isqrt(limits.most_tokens), 1)
    grid = limits.grid or (side * limits.merge, side * limits.merge)
    count, spans = limits.tokens(grid), tuple[ImageSpan, ...]()
    if limits.grid is not None and limits.mutual:
        start, end = int(batch.start[-1]), int(batch.start[-1] + batch.lengths[-1])
        spans = (ImageSpan(len(batch.rows) - 1, max(start, end - count), end),)
    rows = np.arange(count, dtype=np.int32)
    pixels = bytes(3 * limits.patch**2 * grid[0] * grid[1])
    middle, state = limits.layers // 2, EncodingState()
    half = EncodeImage(grid, pixels, rows[:0], seconds=0.0, first=0, end=middle, state=state)
    rest = half._replace(rows=rows, first=middle, end=limits.layers)
    return [replace(batch, images=(part,), spans=spans) for part in (half, rest)]


def mixed_angles(model: ModelSpec, first: int, device: torch.device) -> MixedAngles | None:
    """Return the angles of image tokens, which begin at row `first` of the rotary table.

    None: the position of an image token is its index, or the model takes no images.
    """
    if model.encoder is None or model.encoder.sections is None:
        return None
    (width,) = model.rope_widths.values()
    return MixedAngles.of(model.encoder.sections, width, first, device)
