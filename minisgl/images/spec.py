"""`ImageSpec`: how the images of one model are resized, normalised and cut into patches."""

from pathlib import Path
from typing import Annotated, Any

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

# Architectures whose images the engine computes. All have the encoder of Qwen3-VL.
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
    image_token the id that the chat template renders once for each image.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: int

    @property
    def unit(self) -> int:
        """Height and width of a token in pixels. Both sizes of a resized image are multiples."""
        return self.patch * self.merge


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
    if not isinstance(architectures, list) or architectures[:1] not in [
        [a] for a in _ARCHITECTURES
    ]:
        return None
    model = _convert(config, _Config, folder / "config.json")
    path = folder / "preprocessor_config.json"
    processor = _convert(read_json(path) if path.is_file() else {}, _Processor, path)
    spec = ImageSpec(
        patch=model.vision_config.patch_size,
        merge=model.vision_config.spatial_merge_size,
        min_pixels=processor.min_pixels or processor.size.shortest_edge,
        max_pixels=processor.max_pixels or processor.size.longest_edge,
        mean=processor.image_mean,
        std=processor.image_std,
        image_token=model.image_token_id,
    )
    if not spec.unit**2 <= spec.min_pixels <= spec.max_pixels or 0 in spec.std:
        raise ConfigError(
            f"{path}: an image must have from {spec.unit**2} pixels on, the smallest number of "
            "pixels must not exceed the largest, and image_std must not have 0; restore the file"
        )
    return spec


def _convert(values: dict[str, Any], kind: type[Any], path: Path) -> Any:
    """Fill a struct with the values of a file that are not null. Raises ConfigError."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; restore the file") from None
