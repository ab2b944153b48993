"""The kernel of minisgl.kernel.logits.apply_token_mask."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["row_stride", "width", "words", "first_id"],
    do_not_specialize_on_alignment=["logits", "rows", "mask"],
)
def _apply_token_mask(logits, rows, mask, row_stride, width, words, first_id, BLOCK: tl.constexpr):
    """Each program reads BLOCK / 32 words of one row and writes only the forbidden logits."""
    blocks = tl.cdiv(width, BLOCK)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ids = first_id + cols
    word = tl.load(mask + index * words + ids // 32, mask=ids < words * 32, other=0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    row = tl.load(rows + index).to(tl.int64)
    tl.store(logits + row * row_stride + cols, float("-inf"), mask=(cols < width) & forbidden)


def apply_token_mask(logits: Tensor, rows: Tensor, mask: Tensor, first_id: int) -> None:
    """As the reference. logits: rows of contiguous elements; mask: contiguous."""
    width, words = logits.shape[1], mask.shape[1]
    grid = (triton.cdiv(width, _BLOCK) * len(rows),)
    stride = logits.stride(0)
    _apply_token_mask[grid](
        logits, rows, mask, stride, width, words, first_id, BLOCK=_BLOCK, num_warps=4
    )
