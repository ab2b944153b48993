"""Rotary position embedding: the table of cosines and sines, for each method of scaling.

A method of scaling extends the context. Its `scale` changes the frequencies of a head, a float32
tensor [rotary_dim / 2] on the CPU. `context` is the context length that the engine serves.
"""

import math
from typing import Annotated, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor

# A positive number in the range of float32. The rotary table is computed in float32.
Positive = Annotated[float, Meta(gt=0, lt=2.0**128)]


class LinearRope(Struct, frozen=True):
    """Divides positions by `factor` (Chen et al. 2023)."""

    factor: Positive

    def scale(self, frequencies: Tensor, theta: float, context: int) -> Tensor:
        return frequencies / self.factor


class Llama3Rope(Struct, frozen=True):
    """Divides the frequencies of long wavelengths by `factor`, and keeps the others (Llama 3.1).

    A ramp interpolates between long and short wavelengths.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position: int

    def scale(self, frequencies: Tensor, theta: float, context: int) -> Tensor:
        """Keep the frequencies that turn more than high_freq_factor times in the original context.

        Divide the frequencies that turn less than low_freq_factor times, and interpolate between.
        """
        turns = self.original_max_position * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class YarnRope(Struct, frozen=True):
    """YaRN (Peng et al. 2023): interpolation per dimension, and a factor on cosines and sines.

    attention_factor  the factor, already computed if the config gives mscale and mscale_all_dim.
    truncate          whether the ends of the ramp are rounded to whole dimensions.
    """

    factor: Positive
    attention_factor: Positive
    original_max_position: int
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    def scale(self, frequencies: Tensor, theta: float, context: int) -> Tensor:
        """Keep the dimensions that turn more than beta_fast times in the original context.

        Divide the dimensions that turn less than beta_slow times, and interpolate between.
        """
        half = len(frequencies)

        def dimension(turns: float) -> float:
            ratio = self.original_max_position / (turns * 2 * math.pi)
            return half * math.log(ratio) / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        width = high - low or 0.001  # as in the paper's code, for a ramp whose ends coincide
        index = torch.arange(half, dtype=torch.float32)
        divided = ((index - low) / width).clamp(0, 1)
        return frequencies * (1 - divided + divided / self.factor)


class LongRope(Struct, frozen=True):
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, a factor on cosines and sines.

    short_factor  the divisors of a context of at most original_max_position tokens.
    long_factor   the divisors of a longer context.

    One list serves all requests, because requests of any length share cached keys. The engine
    chooses it by the context length that it serves.
    """

    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    attention_factor: Positive
    original_max_position: int

    def scale(self, frequencies: Tensor, theta: float, context: int) -> Tensor:
        is_long = context > self.original_max_position
        return frequencies / torch.tensor(self.long_factor if is_long else self.short_factor)


class ProportionalRope(Struct, frozen=True):
    """The first part of the pairs turns as in a whole rotation, and the others stay (Gemma 4).

    partial_rotary_factor  the part of the pairs. factor: as LinearRope.
    """

    partial_rotary_factor: Positive = 1.0
    factor: Positive = 1.0

    def scale(self, frequencies: Tensor, theta: float, context: int) -> Tensor:
        turning = int(self.partial_rotary_factor * len(frequencies))
        index = torch.arange(len(frequencies))
        return torch.where(index < turning, frequencies / self.factor, 0.0)


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope


class Rope(NamedTuple):
    """The rotary embedding of a layer.

    rotary_dim: the number of elements of a head that rotate. 0: the layer has no rotary embedding.
    """

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int


class QueryScale(NamedTuple):
    """The factor on the queries of late positions: 1 + beta ln(1 + floor(position / original)).

    Source: Llama 4 and Ministral 3. original: tokens of the original context.
    """

    beta: float
    original: int


def rotary_order(head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """Return the order in which a model stores the elements of a query or key head.

    Checkpoints rotate element i with element i + rotary_dim / 2. The kernels rotate element i with
    element i + head_dim / 2. In this order, both pairs are the same: the first half of the head has
    the first elements of the rotated pairs, then elements that do not rotate. Attention does not
    depend on the order. An empty tuple means the order of the checkpoint.
    """
    if rotary_dim in (0, head_dim):
        return ()
    half, middle = rotary_dim // 2, (head_dim + rotary_dim) // 2
    parts = range(half), range(rotary_dim, middle), range(half, rotary_dim), range(middle, head_dim)
    return tuple(index for part in parts for index in part)


def rope_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """Return float32 [num_positions, head_dim] on `device`: D/2 cosines, then D/2 sines.

    Elements that do not rotate have cosine 1 and sine 0. The CPU computes frequencies and angles in
    float32, so that every device gets the same table.
    """
    table = torch.zeros((num_positions, 2, head_dim // 2))
    table[:, 0] = 1.0
    if rope.rotary_dim:
        half, scaling = rope.rotary_dim // 2, rope.scaling
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        frequencies = 1.0 / rope.theta**exponents
        if scaling is not None:
            frequencies = scaling.scale(frequencies, rope.theta, num_positions)
        magnitude = getattr(scaling, "attention_factor", 1.0)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        table[:, 0, :half], table[:, 1, :half] = angles.cos() * magnitude, angles.sin() * magnitude
    return table.flatten(1).to(device)


def query_scale_table(
    scale: QueryScale | None, num_positions: int, device: torch.device
) -> Tensor | None:
    """Return the factors of all positions, float32 [num_positions, 1] on `device`, or None."""
    if scale is None:
        return None
    turns = (torch.arange(num_positions, dtype=torch.float32) / scale.original).floor()
    return (1 + scale.beta * torch.log(1 + turns)).unsqueeze(1).to(device)
