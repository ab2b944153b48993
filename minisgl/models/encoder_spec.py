"""The description of an image encoder, and its reader."""

from enum import StrEnum
from typing import NamedTuple, TypeVar, cast

from minisgl.core import ConfigError
from minisgl.images.spec import CHANNELS, HfSiglip, HfVision
from minisgl.models.hf_config import Raw, check_supported, read_fields
from minisgl.models.text_part import renamed

Fields = TypeVar("Fields", HfVision, HfSiglip)


# Old beginnings of the names of an encoder's tensors, with those in the new spelling.
_ENCODER_PREFIXES = (
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


class MergerKind(StrEnum):
    """How the patches of a square become an image token.

    MLP      a norm over each patch, and an MLP of the patches of the square.
    AVERAGE  a norm over each patch, their average, an RMSNorm and a linear layer (Gemma 3).
    """

    MLP = "mlp"
    AVERAGE = "average"


class EncoderSpec(NamedTuple):
    """The image encoder of a model, and the positions of image tokens.

    depth     blocks.
    hidden    the width of a patch in the blocks. inner: that of their MLPs.
    patch     height and width of a patch in pixels.
    frames    equal frames that the patch embedding expects of an image.
    merge     an image token merges a square of merge * merge patches.
    side      rows and columns of the table of learned positions.
    size      the width of the residual stream of the language model.
    taps      the blocks whose outputs DeepStack adds to the stream, after the first layers of the
              language model, in this order. Empty: none.
    sections  rotary frequencies of the language model that follow the frame, the row and the column
              of an image token (MixedAngles.axes). None: its position is its index.
    mean, std of each channel: the encoder reads (pixel / 255 - mean) / std.
    rotary    queries and keys rotate by the row and the column of their patch.
    merger    the module that makes an image token of the patches of a square.
    split_qkv the checkpoint has q_proj, k_proj and v_proj in place of one linear.
    fixed     all images have side * side patches.
    mutual    the tokens of one image attend to each other in both directions.
    divisor   of the embedding, because the residual stream is divided (Multipliers.embedding).
    """

    depth: int
    hidden: int
    inner: int
    heads: int
    patch: int
    frames: int
    merge: int
    side: int
    size: int
    taps: tuple[int, ...]
    sections: tuple[int, int, int] | None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rotary: bool = True
    merger: MergerKind = MergerKind.MLP
    split_qkv: bool = False
    fixed: bool = False
    mutual: bool = False
    divisor: float = 1.0

    @property
    def width(self) -> int:
        """The features of an image token: its embedding, and those of DeepStack."""
        return self.size * (1 + len(self.taps))

    @property
    def weights(self) -> int:
        """The number of parameters."""
        merged = self.hidden * self.merge**2
        block = 4 * self.hidden**2 + 2 * self.hidden * self.inner + 9 * self.hidden + self.inner
        merger = merged * (merged + 1) + (merged + 1) * self.size
        if self.merger is MergerKind.AVERAGE:
            merger = self.hidden * (1 + self.size)
        norms = 2 * self.hidden + 2 * merged * len(self.taps)
        patches = (CHANNELS * self.patch**2 + 1 + self.side**2) * self.hidden
        return patches + self.depth * block + (1 + len(self.taps)) * merger + norms

    def flops(self, grid: tuple[int, int]) -> int:
        """Return the floating-point operations for an image of grid = (rows, columns) patches."""
        patches, merged = grid[0] * grid[1], self.hidden * self.merge**2
        block = 4 * self.hidden**2 + 2 * self.hidden * self.inner + 2 * patches * self.hidden
        merger = (1 + len(self.taps)) * merged * (merged + self.size) // self.merge**2
        if self.merger is MergerKind.AVERAGE:
            merger = self.hidden * self.size // self.merge**2
        return 2 * patches * (CHANNELS * self.patch**2 * self.hidden + self.depth * block + merger)

    @property
    def largest_span(self) -> int:
        """The most tokens that one chunk must have together (ImageLimits.mutual)."""
        return (self.side // self.merge) ** 2 if self.mutual else 1


def _vision_config(raw: Raw, kind: type[Fields]) -> Fields | None:
    """Read vision_config; None if the file has none. Raises ConfigError."""
    given = raw.get("vision_config")
    if not isinstance(given, dict):
        return None
    fields = read_fields(given, kind, "vision_config")
    check_supported("vision_config.hidden_act", fields.hidden_act, ["gelu_pytorch_tanh"])
    return fields


def siglip_spec_of(raw: Raw, size: int, divisor: float) -> EncoderSpec | None:
    """Read vision_config of a Gemma 3; None if the file has none. Raises ConfigError.

    size: the width of the language model's stream. divisor: as in EncoderSpec.
    """
    fields, where = _vision_config(raw, HfSiglip), "vision_config"
    if fields is None:
        return None
    check_supported(f"{where}.model_type", fields.model_type, ["siglip_vision_model"])
    check_supported(f"{where}.num_channels", fields.num_channels, [CHANNELS])
    check_supported(f"{where}.layer_norm_eps", fields.layer_norm_eps, [1e-6])
    if fields.hidden_size % (4 * fields.num_attention_heads):
        raise ConfigError(
            f"{where}: hidden_size {fields.hidden_size} is not supported: expected a multiple of "
            f"4 * num_attention_heads {fields.num_attention_heads}"
        )
    return EncoderSpec(
        depth=fields.num_hidden_layers,
        hidden=fields.hidden_size,
        inner=fields.intermediate_size,
        heads=fields.num_attention_heads,
        patch=fields.patch_size,
        frames=1,
        merge=fields.merge(raw),
        side=fields.side,
        size=size,
        taps=(),
        sections=None,
        rotary=False,
        merger=MergerKind.AVERAGE,
        split_qkv=True,
        fixed=True,
        mutual=True,
        divisor=divisor,
    )


def siglip_names(depth: int) -> dict[str, str]:
    """Return the checkpoint's names of the modules of SigLIP (ModelSpec.names)."""
    ours, theirs = "model.visual", "model.vision_tower"
    names = {
        f"{ours}.patch_embed.proj": f"{theirs}.embeddings.patch_embedding",
        f"{ours}.pos_embed": f"{theirs}.embeddings.position_embedding",
        f"{ours}.merger.norm": f"{theirs}.post_layernorm",
    }
    parts = {
        "norm1": "layer_norm1",
        "norm2": "layer_norm2",
        "attn": "self_attn",
        "attn.proj": "self_attn.out_proj",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
    }
    for block in range(depth):
        layer = f"{theirs}.encoder.layers.{block}"
        names |= {f"{ours}.blocks.{block}.{our}": f"{layer}.{its}" for our, its in parts.items()}
    return names


def encoder_spec_of(
    raw: Raw, size: int, sections: tuple[int, int, int], *, deepstack: bool
) -> EncoderSpec | None:
    """Read vision_config of config.json; None if the file has none. Raises ConfigError.

    size: the width of the language model's stream. sections: the sections of rotary frequencies if
    config.json has none. deepstack: whether the family has DeepStack.
    """
    fields, where = _vision_config(raw, HfVision), "vision_config"
    if fields is None:
        return None
    check_supported(f"{where}.in_channels", fields.in_channels, [CHANNELS])
    side = round(fields.num_position_embeddings**0.5)
    check_supported(f"{where}.num_position_embeddings", fields.num_position_embeddings, [side**2])
    check_supported(f"{where}.out_hidden_size", fields.out_hidden_size, [size])
    if fields.hidden_size % (4 * fields.num_heads):
        raise ConfigError(
            f"{where}: hidden_size {fields.hidden_size} is not a multiple of 4 * num_heads "
            f"{fields.num_heads}, as the rotary embedding of rows and columns needs"
        )
    taps = fields.deepstack_visual_indexes if deepstack else ()
    if any(not 0 <= block < fields.depth for block in taps) or sorted(set(taps)) != list(taps):
        raise ConfigError(
            f"{where}: deepstack_visual_indexes {list(taps)} is not supported: expected rising "
            f"numbers of blocks below depth {fields.depth}"
        )
    return EncoderSpec(
        depth=fields.depth,
        hidden=fields.hidden_size,
        inner=fields.intermediate_size,
        heads=fields.num_heads,
        patch=fields.patch_size,
        frames=fields.temporal_patch_size,
        merge=fields.spatial_merge_size,
        side=side,
        size=size,
        taps=taps,
        sections=_sections(raw, sections),
    )


def _sections(raw: Raw, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return mrope_section of the rotary settings. Raises ConfigError."""
    found = (raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    sections = next((rope["mrope_section"] for rope in found if "mrope_section" in rope), default)
    whole = all(isinstance(section, int) and section >= 0 for section in sections)
    if not whole or len(sections) != len(default):
        raise ConfigError(f"mrope_section is {sections!r}: expected three numbers of frequencies")
    return cast("tuple[int, int, int]", tuple(sections))


def encoder_name(name: str) -> str:
    """Return the name of a tensor of an image encoder in the new spelling of transformers."""
    return renamed(name, _ENCODER_PREFIXES)
