"""NVFP4 checkpoints of compressed-tensors and ModelOpt. The activations keep their dtype."""

import torch

from minisgl.kernel.packed_weights import unpack
from minisgl.quantization.packed import PackedFormat, StoredTensor, as_stored

GROUP = 16
# The scales of random weights: with the codes, whose deviation is 2.9, weights of about 0.02.
_RANDOM_SCALE, _RANDOM_ROW_SCALE = 2.0**-3, 2.0**-4


def nvfp4_pack_quantized() -> PackedFormat:
    """The format of compressed-tensors. The stored global scale divides the weights."""
    return _format("compressed-tensors", "weight_packed", "weight_global_scale", divides=True)


def modelopt_nvfp4() -> PackedFormat:
    """The format of NVIDIA ModelOpt. The stored global scale multiplies the weights."""
    return _format("ModelOpt", "weight", "weight_scale_2", divides=False)


def _format(name: str, codes: str, global_scale: str, divides: bool) -> PackedFormat:
    read = torch.reciprocal if divides else as_stored
    constant = 1 / _RANDOM_ROW_SCALE if divides else _RANDOM_ROW_SCALE
    return PackedFormat(
        name,
        GROUP,
        codes=StoredTensor(codes, unpack, ("U8",), columns=2),
        scales=StoredTensor("weight_scale", as_stored, ("F8_E4M3",), constant=_RANDOM_SCALE),
        row_scales=StoredTensor(global_scale, read, ("F32",), constant=constant),
    )
