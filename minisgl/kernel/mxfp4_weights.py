"""MXFP4 matrices: storage, and the torch reference (OCP Microscaling Formats, version 1.0).

A block is 32 neighbouring weights of a row. A weight is an e2m1 code of 4 bits: the sign, two bits
of the exponent and one of the mantissa. A block has one scale, a power of two as an e8m0 byte.

A checkpoint stores two codes in a byte, the first one in the low bits. The engine stores the 8
codes of each word of 32 bits in another order (`recode`), so that a kernel extracts them with few
instructions. A kernel extracts the codes in pairs, as two bfloat16 numbers: pair i has code i of
the word in the lower 16 bits and code i + 4 in the higher ones. Bits 15 and 31 are the signs, bits
6 to 8 and 22 to 24 the other bits of the codes. All other bits are 0: the mask of a pair is
0x81C081C0. Pair 0 is the masked word. Pair 1 is the word rotated left by 10 bits, and pair 2 the
word shifted left by 4, both masked. Pair 3 is the masked XOR of the word shifted left by 6 and the
word shifted right by 2.

A chunk is 4 blocks of a row: 64 bytes of codes, and 4 scales. A checkpoint stores a matrix row
after row. The engine stores it chunk after chunk, and in a chunk row after row (`by_chunks`). A
program reads one chunk of many rows at a time, and these chunks are neighbours in memory.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK: Final = 32
BLOCK_BYTES: Final = BLOCK // 2
CHUNK_BLOCKS: Final = 4
_BIAS = 127  # of the exponent of a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign
_SIGNS, _MAGNITUDES = 0x80008000 - 2**32, 0x01C001C0  # the bits of a pair, as int32
_STEP_WORDS = 2**24  # words that are recoded at once, to bound the memory


def num_chunks(columns: int) -> int:
    """Return the number of chunks of a row with `columns` weights."""
    return -(-columns // (BLOCK * CHUNK_BLOCKS))


def by_chunks(values: Tensor, block_bytes: int) -> Tensor:
    """Return codes or scales in the order of the engine: chunk after chunk.

    values: uint8 [..., rows, blocks * block_bytes]. Returns a view or a copy, [..., chunks, rows,
    CHUNK_BLOCKS * block_bytes]. The blocks that the last chunk lacks are zeros.
    """
    size = CHUNK_BLOCKS * block_bytes
    padded = pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*padded.shape[:-1], -1, size).movedim(-2, -3)


def recode(codes: Tensor) -> Tensor:
    """Return the codes of a checkpoint in the order of the engine.

    codes: uint8 [..., n * 4]. The result has the same shape, type and device.
    """
    words = codes.contiguous().view(torch.int32).flatten()
    result = torch.cat([_recoded(part) for part in torch.split(words, _STEP_WORDS)])
    return result.view(torch.uint8).view(codes.shape)


def _recoded(words: Tensor) -> Tensor:
    """Return the words whose pairs equal the codes.

    A bit of a pair is one bit of the word, or the XOR of two.
    """
    pairs = [
        _left(words, 12 - 4 * i) & _SIGNS | _left(words, 6 - 4 * i) & _MAGNITUDES for i in range(4)
    ]
    found = pairs[0] | _left(pairs[1], -10) | _left(pairs[1], 22) | _left(pairs[2], -4)
    # The other pairs fix 24 bits of the word; pair 3 fixes the others. Its bit 31 is bit 25 of the
    # word, its bit 23 is bit 17 XOR bit 25, and so on.
    rest = (pairs[3] ^ _left(found, 6) ^ _left(found, -2)) & (_SIGNS | _MAGNITUDES)
    found |= _left(rest, -6) & 0x00010001 | _left(rest, 2) & 0x04000400
    bit = torch.zeros_like(rest)
    for source in (31, 23, 15, 7):
        bit = bit ^ _left(rest, -source) & 1
        found |= bit << (source - 6)
    return found


def _left(words: Tensor, bits: int) -> Tensor:
    """Shift int32 words left, or right by -bits with zeros."""
    if bits >= 0:
        return words << bits
    return (words >> -bits) & (1 << (32 + bits)) - 1


def dequantise(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the weights [..., rows, columns] in `dtype`.

    codes: uint8 [..., chunks, rows, 64], contiguous, of `recode` and `by_chunks`. scales: uint8
    [..., chunks, rows, 4], powers of two.
    """
    words = codes.view(torch.int32)
    rotated = _left(words, 10) | _left(words, -22)
    last = _left(words, 6) ^ _left(words, -2)
    pairs = torch.stack((words, rotated, _left(words, 4), last), dim=-1)
    halves = torch.stack((pairs, pairs >> 16), dim=-2)  # codes 0 to 3, then 4 to 7
    indices = halves >> 6 & 7 | halves >> 12 & 8
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    blocks = table[indices].view(*scales.shape, BLOCK)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS)
    chunks = (blocks * powers.unsqueeze(-1)).flatten(-2)
    return chunks.movedim(-3, -2).flatten(-2)[..., :columns].to(dtype).contiguous()
