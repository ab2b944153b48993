"""Rotary position embedding: the table of cosines and sines, for each method of scaling.

A method of scaling extends the context. Its `scale` changes the D/2 frequencies of a head, a
float32 tensor on the CPU.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

# A positive number in the range of float32. The rotary table is computed in float32.
Positive = Annotated[float, Meta(gt=0, lt=2.0**128)]


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Divides positions by `factor` (Chen et al. 2023)."""

    factor: Positive

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Divides the frequencies of long wavelengths by `factor`, and keeps the others (Llama 3.1).

    A ramp interpolates between long and short wavelengths.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position: int

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Keep the frequencies that turn more than high_freq_factor times in the original context.

        Divide the frequencies that turn less than low_freq_factor times, and interpolate between.
        """
        turns = self.original_max_position * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YarnRope:
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

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
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


RopeScaling = LinearRope | Llama3Rope | YarnRope


def rope_table(
    theta: float,
    head_dim: int,
    scaling: RopeScaling | None,
    num_positions: int,
    device: torch.device,
) -> Tensor:
    """Return float32 [num_positions, head_dim] on `device`: D/2 cosines, then D/2 sines.

    The CPU computes frequencies and angles in float32, so that every device gets the same table.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
    magnitude = scaling.attention_factor if isinstance(scaling, YarnRope) else 1.0
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1).to(device)
