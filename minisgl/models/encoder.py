"""The image encoder: a vision transformer, and the mergers that make image tokens of patches.

Qwen3-VL, Qwen3.5 and later have mergers with an MLP. Gemma 3 has SigLIP and averages patches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.images.spec import CHANNELS
from minisgl.kernel.dispatch import qk_norm_rope_store
from minisgl.layers.shards import Placement
from minisgl.models.encoder_spec import EncoderSpec, MergerKind

# The beginning of the names of tensors in a checkpoint, unless ModelSpec.names has others.
_STORED = "model.visual."
# The beginnings of the names of all encoders' tensors in a checkpoint (encoder_spec.encoder_name).
ENCODER_TENSORS = (_STORED, "model.vision_tower.", "model.multi_modal_projector.")
_EPS = 1e-6
_THETA = 10_000.0  # the base of the rotary embedding


def _stored(name: str) -> str:
    """Return the name in a checkpoint of a parameter of CausalLM.encoder."""
    return _STORED + name.removeprefix("encoder.")


class _Whole(nn.Module):
    """A module whose parameters each rank holds whole, by their names in the checkpoint."""

    def placements(self, name: str) -> Iterator[Placement]:
        """See Sharded."""
        for parameter, value in self.named_parameters(recurse=False):
            target = f"{name}.{parameter}"
            yield Placement(_stored(target), tuple(value.shape), target)


class EncoderLinear(_Whole, nn.Linear):
    """A linear layer with a bias."""


class SplitQkv(EncoderLinear):
    """A linear layer whose rows are those of q_proj, k_proj and v_proj in the checkpoint."""

    def placements(self, name: str) -> Iterator[Placement]:
        """See Sharded."""
        for placement in super().placements(name):
            rows, *others = placement.shape
            parameter = placement.target.rpartition(".")[2]
            for nth, part in enumerate(("q_proj", "k_proj", "v_proj")):
                source = _stored(f"{name.rpartition('.')[0]}.{part}.{parameter}")
                shape, offset = (rows // 3, *others), nth * rows // 3
                yield placement._replace(source=source, shape=shape, offset=offset)


class EncoderNorm(_Whole, nn.LayerNorm):
    """A LayerNorm with weight and bias."""

    def placements(self, name: str) -> Iterator[Placement]:
        """See Sharded. Random weights are 1."""
        for placement in super().placements(name):
            is_weight = placement.target.endswith("weight")
            yield placement._replace(constant=1.0) if is_weight else placement


class PositionTable(_Whole):
    """The learned positions of a square of patches. weight: [side * side, hidden]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.side = spec.side
        self.weight = nn.Parameter(torch.empty(spec.side**2, spec.hidden))

    def forward(self, rows: int, cols: int) -> Tensor:
        """Return the positions of rows * cols patches, float32 [rows, cols, hidden]."""
        table = self.weight.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        scaled = functional.interpolate(table, (rows, cols), mode="bilinear", align_corners=True)
        return scaled[0].permute(1, 2, 0)


class PatchEmbedding(nn.Module):
    """The convolution over the frames of a patch. weight: [hidden, 3 * patch * patch].

    The frames of an image are equal, so the loader adds up the weights of all frames.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.stored = spec.hidden, CHANNELS, spec.frames, spec.patch, spec.patch
        self.weight = nn.Parameter(torch.empty(spec.hidden, CHANNELS * spec.patch**2))
        self.bias = nn.Parameter(torch.empty(spec.hidden))

    def forward(self, patches: Tensor) -> Tensor:
        """Return [N, hidden]. patches: [N, 3 * patch * patch], channel by channel."""
        return functional.linear(patches, self.weight, self.bias)

    def placements(self, name: str) -> Iterator[Placement]:
        """See Sharded."""
        source = _stored(f"{name}.proj")
        convert = partial(_sum_of_frames, shape=self.stored)
        yield Placement(f"{source}.weight", self.stored, f"{name}.weight", convert=convert)
        yield Placement(f"{source}.bias", self.stored[:1], f"{name}.bias")


def _sum_of_frames(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """shape: of the weight, in which a checkpoint may leave out a single frame."""
    return weight.float().view(shape).sum(2).flatten(1)


class EncoderAttention(nn.Module):
    """Attention of all patches of an image to each other, with a rotary embedding."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        linear = SplitQkv if spec.split_qkv else EncoderLinear
        self.qkv = linear(spec.hidden, 3 * spec.hidden)
        self.proj = EncoderLinear(spec.hidden, spec.hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return [N, hidden]. x: [N, hidden]. angles: float32 [N, D], as ImageEncoder._angles."""
        count, qkv = len(x), self.qkv(x)
        # The kernel of the language model rotates queries and keys in one launch. The keys and
        # values go to pages of one token each, so that one compiled kernel serves all images.
        dim = qkv.shape[1] // (3 * self.heads)
        k, v = qkv.new_empty((2, count, 1, self.heads, dim))
        places = torch.arange(count, dtype=torch.int32, device=x.device)
        rotation = (None, None, 0.0, angles, places, places)
        q = qk_norm_rope_store(qkv, *rotation, k, v, self.heads, self.heads, dim)
        q, k, v = (part.view(1, count, self.heads, dim).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return cast("Tensor", self.proj(mixed[0].transpose(0, 1).flatten(1)))


class EncoderMlp(nn.Module):
    """Two linears with a GELU between them. approximate: as in functional.gelu."""

    def __init__(self, inputs: int, inner: int, outputs: int, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.linear_fc1 = EncoderLinear(inputs, inner)
        self.linear_fc2 = EncoderLinear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.linear_fc1(x), approximate=self.approximate)
        return cast("Tensor", self.linear_fc2(inner))


class EncoderBlock(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.norm1 = EncoderNorm(spec.hidden, _EPS)
        self.norm2 = EncoderNorm(spec.hidden, _EPS)
        self.attn = EncoderAttention(spec)
        self.mlp = EncoderMlp(spec.hidden, spec.inner, spec.hidden, "tanh")

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return cast("Tensor", x + self.mlp(self.norm2(x)))


class Merger(EncoderMlp):
    """Merges the patches of a square into one image token.

    whole: the norm is over the merged patches, as in DeepStack, and not over each patch.
    """

    def __init__(self, spec: EncoderSpec, whole: bool = False) -> None:
        merged = spec.hidden * spec.merge**2
        super().__init__(merged, merged, spec.size, "none")
        self.norm = EncoderNorm(merged if whole else spec.hidden, _EPS)
        self.merged, self.whole = merged, whole

    def forward(self, x: Tensor) -> Tensor:
        """Return [N / merge / merge, size]. x: [N, hidden], square after square."""
        if self.whole:
            return super().forward(self.norm(x.view(-1, self.merged)))
        return super().forward(self.norm(x).view(-1, self.merged))


class Encoding(NamedTuple):
    """An image between two blocks of the encoder.

    x         [N, hidden], the N patches, square after square.
    angles    float32 [N, D], as ImageEncoder._angles.
    features  of each tap of DeepStack so far, [tokens, size].
    """

    x: Tensor
    angles: Tensor
    features: tuple[Tensor, ...] = ()


class Projection(nn.Module):
    """The projector of Gemma 3: an RMSNorm and a linear layer, as ImageEncoder calls the merger.

    It makes the features of an image token from the average of the patches of a square.
    scale: [hidden], of the norm. weight: [size, hidden].
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.squares, self.divisor = spec.merge**2, spec.divisor
        self.norm = EncoderNorm(spec.hidden, _EPS)
        self.scale = nn.Parameter(torch.empty(spec.hidden))
        self.weight = nn.Parameter(torch.empty(spec.size, spec.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return [N / merge / merge, size]. x: [N, hidden], square after square."""
        mean = self.norm(x).view(-1, self.squares, x.shape[1]).mean(1)
        normed = functional.rms_norm(mean.float(), mean.shape[1:], self.scale.float(), _EPS)
        return functional.linear(normed.to(x.dtype), self.weight)

    def placements(self, name: str) -> Iterator[Placement]:
        """See Sharded. The checkpoint stores the scale less 1."""
        source, (size, hidden) = "model.multi_modal_projector", self.weight.shape
        names = f"{source}.mm_soft_emb_norm.weight", f"{source}.mm_input_projection_weight"
        yield Placement(names[0], (hidden,), f"{name}.scale", convert=_plus_one, constant=0.0)
        convert = partial(_transposed, divisor=self.divisor)
        yield Placement(names[1], (hidden, size), f"{name}.weight", convert=convert)


def _plus_one(scale: Tensor) -> Tensor:
    return scale.float() + 1


def _transposed(weight: Tensor, divisor: float) -> Tensor:
    return weight.float().t() / divisor


_MERGERS: Mapping[MergerKind, Callable[[EncoderSpec], nn.Module]] = MappingProxyType(
    {MergerKind.MLP: Merger, MergerKind.AVERAGE: Projection}
)


class ImageEncoder(nn.Module):
    """The image encoder. Rank 0 holds it whole."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbedding(spec)
        self.pos_embed = PositionTable(spec)
        self.blocks = nn.ModuleList(EncoderBlock(spec) for _ in range(spec.depth))
        self.merger = _MERGERS[spec.merger](spec)
        self.deepstack_merger_list = nn.ModuleList(Merger(spec, whole=True) for _ in spec.taps)

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the features of an image, as `finish`. pixels: as for `begin`."""
        return self.finish(self.advance(self.begin(pixels), 0, self.spec.depth))

    def begin(self, pixels: Tensor) -> Encoding:
        """Return an image before the first block. No host sync.

        pixels: uint8 [rows * patch, columns * patch, 3] on the device of the weights. Rows and
        columns are multiples of `merge`.
        """
        rows, cols = (size // self.spec.patch for size in pixels.shape[:2])
        x = self.patch_embed(self._patches(pixels, rows, cols))
        x = x + self._in_squares(self.pos_embed(rows, cols)).to(x.dtype)
        return Encoding(x, self._angles(rows, cols))

    def advance(self, encoding: Encoding, first: int, end: int) -> Encoding:
        """Return the image after the blocks `first` to `end` - 1."""
        (x, angles, features), taps = encoding, self.spec.taps
        for number in range(first, end):
            x = self.blocks[number](x, angles)
            if number in taps:
                features += (self.deepstack_merger_list[taps.index(number)](x),)
        return Encoding(x, angles, features)

    def finish(self, encoding: Encoding) -> Tensor:
        """Return the features of an image's tokens, row after row: [tokens, spec.width].

        The first `size` features are the embedding. Those of each tap of DeepStack follow. The
        result has the dtype of the weights. encoding: after all blocks.
        """
        return torch.cat((self.merger(encoding.x), *encoding.features), dim=1)

    def _patches(self, pixels: Tensor, rows: int, cols: int) -> Tensor:
        """Return the normalised pixels of each patch, [N, 3 * patch * patch]."""
        spec = self.spec
        # A copy that does not block. Building the tensor on the device would wait for the device.
        mean, std = torch.tensor((spec.mean, spec.std)).to(pixels.device, non_blocking=True)
        values = (pixels.float() / 255 - mean) / std
        parts = values.view(rows, spec.patch, cols, spec.patch, CHANNELS)
        patches = self._in_squares(parts.permute(0, 2, 4, 1, 3).flatten(2))
        return patches.to(self.patch_embed.weight.dtype)

    def _in_squares(self, x: Tensor) -> Tensor:
        """Order patches [rows, cols, n] by the squares that merge: [rows * cols, n]."""
        (rows, cols, _), merge = x.shape, self.spec.merge
        squares = x.view(rows // merge, merge, cols // merge, merge, -1)
        return squares.transpose(1, 2).reshape(rows * cols, -1)

    def _angles(self, rows: int, cols: int) -> Tensor:
        """Return D / 2 cosines and D / 2 sines for each patch, float32 [N, D].

        The first frequencies follow the row of the patch, the others its column.
        """
        device, quarter = self.pos_embed.weight.device, self.spec.hidden // self.spec.heads // 4
        exponents = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
        # Without a rotary embedding all angles are 0, since one kernel stores keys and values.
        frequencies = float(self.spec.rotary) / _THETA**exponents
        row, col = (torch.arange(n, device=device).outer(frequencies) for n in (rows, cols))
        row, col = row[:, None].expand(-1, cols, -1), col.expand(rows, -1, -1)
        angles = self._in_squares(torch.cat((row, col), dim=-1))
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
