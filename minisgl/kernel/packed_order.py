"""The order in which kernels read 4-bit weights: see minisgl.kernel.packed_weights.

A chunk is 128 columns of a row: 64 bytes of codes. The matrix is stored chunk after chunk, and in a
chunk row after row, so that the rows of a program are neighbours in memory.

Four lanes share the chunk of a row, and each reads 16 bytes of it. The matrix unit takes 16 columns
at once. From lane t it takes the columns 2t, 2t + 1, 2t + 8 and 2t + 9. The 16 bytes of a lane are
therefore its columns of eight such steps. Word w of a lane has those of the steps 2w and 2w + 1,
that is of 32 neighbouring columns. Code i of a word is column 2t of its first 8, second 8, third 8
and last 8 columns for i from 0 to 3, and code i + 4 is the column after that of code i. A kernel
decodes the codes i and i + 4 to the two halves of a register.

A header is an int32. int4: its upper half is the scale of a group as bfloat16, and its lower half
is -(128 + zero) as bfloat16. nvfp4: the lower half is the scale of the first 16 columns of a word,
and the upper half that of the last 16, both multiplied by 2^94 (triton/mxfp4.py says why). A row
has one header for each chunk if the columns of a chunk share a scale, and else one for each 32
columns.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from minisgl.kernel.mxfp4_weights import recode
from minisgl.kernel.packed_weights import SYMMETRIC_ZERO, PackedKind, PackedWeights

CHUNK: Final = 128
_WORD_COLUMNS: Final = 32  # columns that the words with the same number of four lanes have
_MAGIC: Final = 128  # bfloat16 has the integers from 128 to 255; their low bits are the codes
_SHIFT: Final = 2.0**94
_STEP_BYTES: Final = 2**26  # of codes that are reordered at once, to bound the memory


@dataclass(frozen=True, slots=True)
class OrderedWeights:
    """A matrix [N, K] of 4-bit weights, or E such matrices, in the order of the kernels.

    codes       uint8 [..., ceil(K / 128), N, 64].
    headers     int32 [..., ceil(K / 128), N, 1 or 4].
    row_scales  nvfp4: float32 [..., N]. int4: None.
    columns     K.
    """

    kind: PackedKind
    columns: int
    codes: Tensor
    headers: Tensor
    row_scales: Tensor | None = None

    def __getitem__(self, experts: int | slice) -> "OrderedWeights":
        """Return the matrix of one expert, or those of a range of experts, as views."""
        rows = None if self.row_scales is None else self.row_scales[experts]
        parts = self.codes[experts], self.headers[experts], rows
        return OrderedWeights(self.kind, self.columns, *parts)

    @property
    def height(self) -> int:
        """N."""
        return self.codes.shape[-2]

    @property
    def scales(self) -> Tensor:
        """The scales of int4 weights in the headers, bfloat16 [..., chunks, N, 1 or 4]."""
        return self.headers.view(torch.bfloat16)[..., 1::2]


def bits_of(kind: PackedKind, group: int | None = None) -> float:
    """Return the bits of a weight and of its share of a header. group: None for a whole row."""
    in_chunks = kind is PackedKind.INT4 and (group is None or group % CHUNK == 0)
    return 4 + 32 / (CHUNK if in_chunks else _WORD_COLUMNS)


def has_order(kind: PackedKind, group: int, columns: int) -> bool:
    """Whether the kernels can read weights with groups of `group` columns in rows of `columns`."""
    return kind is PackedKind.NVFP4 or group % _WORD_COLUMNS == 0 or group == columns


def in_order(weights: PackedWeights) -> OrderedWeights:
    """Return the weights in the order of the kernels. `has_order` is True for them.

    The scales of int4 weights are rounded to bfloat16.
    """
    columns = 2 * weights.codes.shape[-1]
    chunked = pad(weights.codes, (0, -weights.codes.shape[-1] % (CHUNK // 2)))
    flat = chunked.reshape(-1, CHUNK // 2)
    codes = torch.cat([_ordered(part) for part in torch.split(flat, _STEP_BYTES // (CHUNK // 2))])
    is_int4 = weights.kind is PackedKind.INT4
    codes = codes if is_int4 else recode(codes)
    codes = codes.view(*chunked.shape[:-1], -1, CHUNK // 2).movedim(-2, -3).contiguous()
    headers = _headers(weights, columns) if is_int4 else _nvfp4_headers(weights.scales)
    headers = headers.movedim(-2, -3).contiguous()
    return OrderedWeights(weights.kind, columns, codes, headers, weights.row_scales)


def dequantise(weights: OrderedWeights, dtype: torch.dtype) -> Tensor:
    """Return int4 weights as a new [..., N, K] of `dtype`. They are rounded once."""
    assert weights.kind is PackedKind.INT4, "nvfp4 weights have a kernel only; this is a bug"
    nibbles = torch.stack((weights.codes & 15, weights.codes >> 4), dim=-1)
    # From (lane, word, low, half, eight) to the order of the columns, with each word apart.
    places = nibbles.view(*weights.codes.shape[:-1], 4, 4, 2, 2, 2).movedim((-5, -3), (-2, -1))
    columns = places.flatten(-4)
    halves = weights.headers.view(torch.bfloat16).view(*weights.headers.shape, 2).float()
    zeros, scales = (halves[..., half].unsqueeze(-1) for half in (0, 1))
    numbers = (columns.float() + (_MAGIC + zeros)) * scales
    return numbers.flatten(-2).movedim(-3, -2).flatten(-2)[..., : weights.columns].to(dtype)


def _ordered(chunks: Tensor) -> Tensor:
    """Reorder the codes of chunks. uint8 [n, 64]; returns the same shape."""
    if chunks.is_meta:  # `minisgl plan` counts bytes. An operation on meta tensors takes 0.2 ms.
        return chunks
    columns = torch.stack((chunks & 15, chunks >> 4), dim=-1).view(-1, 4, 2, 2, 4, 2)
    # From (word, half, eight, lane, low) to the order of the codes in memory.
    codes = columns.permute(0, 4, 1, 5, 2, 3).reshape(-1, CHUNK // 2, 2)
    return codes[..., 0] | codes[..., 1] << 4


def _headers(weights: PackedWeights, columns: int) -> Tensor:
    """int32 [..., N, chunks, headers of a chunk]."""
    scales, zeros, group = weights.scales, weights.zeros, weights.group
    in_chunks = group % CHUNK == 0 or group == columns
    size, each = (CHUNK, 1) if in_chunks else (_WORD_COLUMNS, CHUNK // _WORD_COLUMNS)
    count = -(-columns // CHUNK) * each
    # From the CPU: on a meta device, where `minisgl plan` counts bytes, arange takes 0.8 ms.
    owner = (torch.arange(count) * size // group).clamp_(max=scales.shape[-1] - 1)
    owner = owner.to(scales.device)
    lower = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    parts = torch.stack((-_MAGIC - lower.float(), scales.float()), dim=-1).bfloat16()
    owned = parts.view(torch.int32).squeeze(-1)[..., owner]
    return owned.view(*owned.shape[:-1], -1, each)


def _nvfp4_headers(scales: Tensor) -> Tensor:
    """scales: e4m3 [..., N, K / 16]. Returns int32 [..., N, chunks, 4]."""
    wide = scales.float() * _SHIFT
    wide = pad(wide, (0, -wide.shape[-1] % (CHUNK // 16)))
    headers = wide.bfloat16().view(torch.int32)
    return headers.view(*headers.shape[:-1], -1, CHUNK // _WORD_COLUMNS)
