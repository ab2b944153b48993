"""The last product of int4 experts for a few tokens, and the sum over the experts of a token.

The vectors of all experts of a token are the columns of one narrow operand, which all warps read
from shared memory. A warp has 16 rows of the weight of one expert and decodes them for itself. Only
the diagonal of the result counts: the product of an expert with its own vector. So the operand is
an eighth as large as one that fills eight columns with the vector of each expert.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code=assignment

import triton
import triton.language as tl
from torch import Tensor, int32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.packed_order import CHUNK, OrderedWeights
from minisgl.kernel.triton.mxfp4 import is_fast
from minisgl.kernel.triton.overlap import is_hopper, overlaps
from minisgl.kernel.triton.packed import decode_chunk, in_quads

_LEAST_PLACES, _LEAST_COLUMNS = 4, 16  # a group of warps, and the narrow operand, of Hopper
_AHEAD = 4  # chunks that a program has loaded when the kernel before it ends
_STAGES = 3  # loads in flight of the chunks after those


@triton.jit
def _add_chunk(
    total,
    words,
    headers,
    vectors,
    PLACES: tl.constexpr,
    QUADS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return total [ROWS, COLUMNS] with the products of one chunk."""
    TYPE: tl.constexpr = vectors.dtype
    w = decode_chunk(words, headers, PLACES, 1, False, True, QUADS, TYPE, FAST)
    if QUADS:
        vectors = in_quads(vectors)
    total = tl.dot(w, vectors.T, total, input_precision="ieee")
    if FAST:
        # As in packed_blocks._product: this use makes the program wait for its products before it
        # decodes the next weights (triton-lang/triton issue 9433).
        total = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return total


@triton.jit
def _down(
    hidden,
    weight,
    headers,
    out,
    experts,
    factors,
    width,
    inner,
    chunks,
    EACH: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADERS: tl.constexpr,
    AHEAD: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    QUADS: tl.constexpr,
    FAST: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute 16 rows of down for the expert at each place of a token, and their sum.

    ADD: the sum is added to `out`.
    The places from EACH on repeat the last expert with a vector of zeros. weight: int32 words of
    experts with `chunks` chunks of `width` rows. AHEAD: chunks that are loaded before gdc_wait.
    MORE: whether a row has more chunks. WHOLE: inner is a multiple of 128.
    """
    ROWS: tl.constexpr = 16 * PLACES
    token = tl.program_id(1)
    first = token * EACH
    r = tl.arange(0, ROWS)
    own = first + tl.minimum(r // 8 % PLACES, EACH - 1)
    loaded = tl.minimum(tl.program_id(0) * 16 + r // (8 * PLACES) * 8 + r % 8, width - 1)
    row = tl.load(experts + own).to(tl.int64) * chunks * width + loaded
    if EARLY:
        gdc_launch_dependents()
    word_at = weight + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    header_at = headers + row[:, None] * HEADERS + tl.arange(0, HEADERS)[None, :]
    column, k = tl.arange(0, COLUMNS), tl.arange(0, 128)
    vector_at = hidden + (first + column)[:, None] * inner + k[None, :]
    live = (column < EACH)[:, None]
    words, packed, vectors = (), (), ()
    for chunk in tl.static_range(AHEAD):
        words += (tl.load(word_at + chunk * width * 16),)
        packed += (tl.load(header_at + chunk * width * HEADERS),)
    if EARLY:
        gdc_wait()
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    if ADD:
        carried = tl.load(out + token * width + n, mask=n < width, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.static_range(AHEAD):
        inside = live if WHOLE else live & (k < inner - chunk * 128)[None, :]
        vectors += (tl.load(vector_at + chunk * 128, mask=inside, other=0.0),)
    for chunk in tl.static_range(AHEAD):
        total = _add_chunk(total, words[chunk], packed[chunk], vectors[chunk], PLACES, QUADS, FAST)
    if MORE:
        for chunk in tl.range(AHEAD, chunks, num_stages=STAGES):
            more_words = tl.load(word_at + chunk * width * 16)
            more_packed = tl.load(header_at + chunk * width * HEADERS)
            inside = live if WHOLE else live & (k < inner - chunk * 128)[None, :]
            v = tl.load(vector_at + chunk * 128, mask=inside, other=0.0)
            total = _add_chunk(total, more_words, more_packed, v, PLACES, QUADS, FAST)
    place = tl.arange(0, PLACES)
    factor = tl.load(factors + first + place, mask=place < EACH, other=0.0)
    is_own = place[:, None, None] == column[None, None, :]
    value = tl.sum(tl.where(is_own, tl.reshape(total, [PLACES, 16, COLUMNS]), 0.0), axis=2)
    value = tl.sum(value * factor[:, None], axis=0)
    if ADD:
        value += carried.to(tl.float32)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=n < width)


def down_of_few(
    hidden: Tensor,
    weights: OrderedWeights,
    experts: Tensor,
    factors: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the experts of each token, a new [T, H] of hidden's dtype.

    hidden: [T * A, I], contiguous. weights: of all experts. experts, factors: int32 and float32
    [T, A]. residual: contiguous [T, H], to which the kernel adds the sum, in place; None: it adds
    it to nothing.
    """
    num_tokens, each = experts.shape
    chunks, width = weights.codes.shape[1:3]
    inner, early = hidden.shape[1], overlaps()
    places = max(triton.next_power_of_2(each), _LEAST_PLACES)
    out = hidden.new_empty((num_tokens, width)) if residual is None else residual
    _down[(triton.cdiv(width, 16), num_tokens)](
        hidden,
        weights.codes.view(int32),
        weights.headers,
        out,
        experts,
        factors,
        width,
        inner,
        chunks,
        EACH=each,
        PLACES=places,
        COLUMNS=max(places, _LEAST_COLUMNS),
        HEADERS=weights.headers.shape[-1],
        AHEAD=min(chunks, _AHEAD),
        MORE=chunks > _AHEAD,
        STAGES=_STAGES,
        WHOLE=inner % CHUNK == 0,
        QUADS=not is_hopper(),
        FAST=is_fast(hidden),
        ADD=residual is not None,
        EARLY=early,
        num_warps=places,
        launch_pdl=early,
    )
    return out
