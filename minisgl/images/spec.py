"""`ImageSpec`: how the images of one model are resized, normalised and cut into patches."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.core import ConfigError
from minisgl.core.files import read_json

CHANNELS = 3  # of a pixel

_Count = Annotated[int, Meta(ge=1, lt=2**31)]
_Depth = Annotated[int, Meta(ge=1, le=10_000)]
_Size = Annotated[int, Meta(ge=1, le=2**10)]  # pixels or patches
_Pixels = Annotated[int, Meta(ge=1, le=2**31)]
_Channels = tuple[float, float, float]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_BICUBIC = 3  # of PIL.Image.Resampling, where 2 is BILINEAR

_GEMMA_3 = "Gemma3ForConditionalGeneration"
# Other architectures whose images the engine computes. All have the encoder of Qwen3-VL.
_ARCHITECTURES = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The processing of images of one model.

    patch       height and width of a patch in pixels.
    merge       `merge` x `merge` neighbouring patches become one token.
    min_pixels, max_pixels
                range of height x width of a resized image.
    mean, std   of each channel: the encoder reads (pixel / 255 - mean) / std.
    image_token the id of a token of an image. Without `around`, the chat template renders it once
                for each image.
    around      the ids of the tokens before and after those of an image. The chat template renders
                the first of them once for each image. None: the prompt gets no such tokens.
    side        height and width of every resized image. None: resizing keeps the ratio.
    resample    the filter of the resizing, as PIL.Image.Resampling.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: int
    around: tuple[int, int] | None = None
    side: int | None = None
    resample: int = _BICUBIC

    @property
    def unit(self) -> int:
        """Height and width of a token in pixels. Both sizes of a resized image are multiples."""
        return self.patch * self.merge

    @property
    def rendered_token(self) -> int:
        """The id that the chat template renders once for each image."""
        return self.image_token if self.around is None else self.around[0]

    @property
    def sequence(self) -> tuple[str | int, ...]:
        """The texts and ids that replace the rendered token of an image.

        image_token stands once and is repeated for each token of the image. The line breaks become
        tokens together with the text around them.
        """
        if self.around is None:
            return (self.image_token,)
        return ("\n\n", self.around[0], self.image_token, self.around[1], "\n\n")


class HfVision(msgspec.Struct, frozen=True):
    """The fields of vision_config in config.json.

    num_position_embeddings: rows of the position table, which is a square.
    deepstack_visual_indexes: the blocks whose outputs go to the first layers of the text.
    """

    depth: _Depth = 27
    hidden_size: _Count = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: _Count = 4304
    num_heads: _Count = 16
    in_channels: _Count = CHANNELS
    patch_size: _Size = 16
    spatial_merge_size: _Size = 2
    temporal_patch_size: _Count = 2
    out_hidden_size: _Count = 3584
    num_position_embeddings: _Count = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class HfSiglip(msgspec.Struct, frozen=True):
    """The fields of vision_config in config.json of Gemma 3. image_size: in pixels."""

    model_type: str = "siglip_vision_model"
    num_hidden_layers: _Depth = 27
    hidden_size: _Count = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: _Count = 4304
    num_attention_heads: _Count = 16
    num_channels: _Count = CHANNELS
    image_size: _Size = 896
    patch_size: _Size = 14
    layer_norm_eps: float = 1e-6

    @property
    def side(self) -> int:
        """Rows and columns of patches."""
        return self.image_size // self.patch_size

    def merge(self, config: Mapping[str, Any]) -> int:
        """Return the side of the square of patches that becomes a token. Raises ConfigError.

        config: config.json, whose mm_tokens_per_image is the number of tokens of an image.
        """
        given = config.get("mm_tokens_per_image")
        tokens = 256 if given is None else given
        per_side = math.isqrt(tokens) if isinstance(tokens, int) and tokens > 0 else 0
        whole = per_side and self.side % per_side == 0 and per_side**2 == tokens
        if not whole or self.image_size % self.patch_size:
            raise ConfigError(
                f"mm_tokens_per_image {tokens!r} with images of {self.image_size} pixels and "
                f"patches of {self.patch_size} is not supported: expected whole patches, and a "
                "square of tokens whose side divides that of the patches"
            )
        return self.side // per_side


class _GemmaConfig(msgspec.Struct, frozen=True):
    """config.json of Gemma 3."""

    vision_config: HfSiglip
    image_token_index: _TokenId = 262_144
    boi_token_index: _TokenId = 255_999
    eoi_token_index: _TokenId = 256_000


class _Square(msgspec.Struct, frozen=True):
    """Height and width of a resized image in pixels."""

    height: _Size
    width: _Size


class _GemmaProcessor(msgspec.Struct, frozen=True):
    """preprocessor_config.json of Gemma 3."""

    size: _Square | None = None
    resample: Literal[2, 3] = 2
    do_pan_and_scan: Literal[False] = False
    image_mean: _Channels = (0.5, 0.5, 0.5)
    image_std: _Channels = (0.5, 0.5, 0.5)


class _Config(msgspec.Struct, frozen=True):
    """config.json."""

    image_token_id: _TokenId
    vision_config: HfVision


class _Edges(msgspec.Struct, frozen=True):
    """Numbers of pixels, despite the names."""

    shortest_edge: _Pixels = 65_536
    longest_edge: _Pixels = 16_777_216


class _Processor(msgspec.Struct, frozen=True):
    """preprocessor_config.json. min_pixels and max_pixels are older names of `size`."""

    size: _Edges = _Edges()
    min_pixels: _Pixels | None = None
    max_pixels: _Pixels | None = None
    image_mean: _Channels = (0.5, 0.5, 0.5)
    image_std: _Channels = (0.5, 0.5, 0.5)


def image_spec(folder: str | Path) -> ImageSpec | None:
    """Return the processing of images of the model in this folder; None if it has no encoder.

    Reads config.json and, if it exists, preprocessor_config.json. Raises ConfigError that names the
    file with a wrong value.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    path = folder / "preprocessor_config.json"
    if name == _GEMMA_3 and config.get("vision_config") is not None:
        spec = _gemma_spec(config, folder / "config.json", path)
    elif name in _ARCHITECTURES:
        spec = _qwen_spec(config, folder / "config.json", path)
    else:
        return None
    if not spec.unit**2 <= spec.min_pixels <= spec.max_pixels or 0 in spec.std:
        raise ConfigError(
            f"{path}: an image must have from {spec.unit**2} pixels on, the smallest number of "
            "pixels must not exceed the largest, and image_std must not have 0; restore the file"
        )
    return spec


def _qwen_spec(config: dict[str, Any], config_path: Path, path: Path) -> ImageSpec:
    """path: of preprocessor_config.json."""
    model = _convert(config, _Config, config_path)
    processor = _convert(read_json(path) if path.is_file() else {}, _Processor, path)
    return ImageSpec(
        patch=model.vision_config.patch_size,
        merge=model.vision_config.spatial_merge_size,
        min_pixels=processor.min_pixels or processor.size.shortest_edge,
        max_pixels=processor.max_pixels or processor.size.longest_edge,
        mean=processor.image_mean,
        std=processor.image_std,
        image_token=model.image_token_id,
    )


def _gemma_spec(config: dict[str, Any], config_path: Path, path: Path) -> ImageSpec:
    """path: of preprocessor_config.json."""
    model = _convert(config, _GemmaConfig, config_path)
    processor = _convert(read_json(path) if path.is_file() else {}, _GemmaProcessor, path)
    side, size = model.vision_config.image_size, processor.size
    if size is not None and (size.height, size.width) != (side, side):
        raise ConfigError(
            f"{path}: images of {size.height} x {size.width} pixels are not supported: the encoder "
            f"takes {side} x {side}; restore the file"
        )
    return ImageSpec(
        patch=model.vision_config.patch_size,
        merge=model.vision_config.merge(config),
        min_pixels=side**2,
        max_pixels=side**2,
        mean=processor.image_mean,
        std=processor.image_std,
        image_token=model.image_token_index,
        around=(model.boi_token_index, model.eoi_token_index),
        side=side,
        resample=processor.resample,
    )


def _convert(values: dict[str, Any], kind: type[Any], path: Path) -> Any:
    """Fill a struct with the values of a file that are not null. Raises ConfigError."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; restore the file") from None
