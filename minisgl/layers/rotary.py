"""Rotary position embedding: the table of cosines and sines for each way of scaling it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): per-dimension interpolation and a factor on cos and sin.

    attention_factor is already resolved from mscale and mscale_all_dim where those are given.
    truncate rounds the ramp's ends to whole dimensions.
    """

    factor: float
    attention_factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = LinearRope | Llama3Rope | YarnRope


def rope_table(
    theta: float,
    head_dim: int,
    scaling: RopeScaling | None,
    num_positions: int,
    device: torch.device,
) -> Tensor:
    """float32 [num_positions, head_dim] on `device`: D/2 cosines, then D/2 sines.

    Frequencies and angles are float32 computed on CPU, so that every device gets the same table.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    magnitude = 1.0
    match scaling:
        case LinearRope():
            frequencies = frequencies / scaling.factor
        case Llama3Rope():
            frequencies = _llama3(frequencies, scaling)
        case YarnRope():
            frequencies = _yarn(frequencies, theta, head_dim, scaling)
            magnitude = scaling.attention_factor
        case None:
            pass
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1).to(device)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Keep where the original context holds more than high_freq_factor turns, divide below low."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, head_dim: int, scaling: YarnRope) -> Tensor:
    """Keep dimensions that turn beta_fast times in the original context, divide below beta_slow."""

    def dimension(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # as the paper's code does, where both ends meet
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    divided = ((index - low) / width).clamp(0, 1)
    return frequencies * (1 - divided + divided / scaling.factor)
