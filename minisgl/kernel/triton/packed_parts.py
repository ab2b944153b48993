"""Parts of packed_tiles.py: the ring, the weights of a chunk in registers, and the end of a tile.

An RMSNorm of x multiplies each row by one factor, which the result gets instead. x already has the
weight of the norm: 4-bit weights cannot take it, and the TMA unit copies x without registers. So
the product that adds to the residual stream also stores the sum times the weight of the next norm.

VARIANT: the constants of packed_tiles._multiply.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from minisgl.kernel.triton.packed import SCALED_ASM, SHIFTED_ASM, ZERO_ASM


@gluon.jit
def _ask_for_weights(inputs, buffers, barrier, stage, row, chunk, VARIANT: gl.constexpr):
    """Start the copies of a chunk of all groups of warps to a stage of the ring."""
    HALVES: gl.constexpr = 2 if VARIANT[6] else 1
    HEIGHT: gl.constexpr = 16 * VARIANT[1] * VARIANT[2] // HALVES
    _, codes, headers = inputs
    words, heads, _ = buffers
    for group in gl.static_range(VARIANT[12]):
        i, first = stage * VARIANT[12] + group, row + group * HEIGHT
        tma.async_copy_global_to_shared(codes, [chunk * HALVES, first, 0], barrier, words.index(i))
        tma.async_copy_global_to_shared(headers, [chunk * HALVES, first], barrier, heads.index(i))


@gluon.jit
def fill_ring(inputs, buffers, barriers, place, begin, steps, VARIANT: gl.constexpr):
    """Fill the ring, and each stage again once it is empty.

    place: the tile, and its first row of x. begin, steps: the chunks of this split.
    """
    BM: gl.constexpr = VARIANT[0]
    STAGES: gl.constexpr = VARIANT[3]
    HALVES: gl.constexpr = 2 if VARIANT[6] else 1
    ROWS: gl.constexpr = 16 * VARIANT[1] * VARIANT[2] * VARIANT[12]
    BYTES: gl.constexpr = ROWS * 68 + BM * 256  # of a stage: codes, headers and rows of x
    x, _, _ = inputs
    _, _, rows = buffers
    full, empty = barriers
    tile, first_row = place
    height = tile * (ROWS // HALVES)
    first = min(steps, STAGES)
    for i in range(first):
        barrier = full.index(i)
        mbarrier.expect(barrier, BYTES)
        _ask_for_weights(inputs, buffers, barrier, i, height, begin + i, VARIANT)
    if VARIANT[8]:
        gdc_wait()
    for i in range(first):
        at = [first_row, (begin + i) * 128]
        tma.async_copy_global_to_shared(x, at, full.index(i), rows.index(i))
    for step in range(first, steps):
        i, chunk = step % STAGES, begin + step
        barrier = full.index(i)
        mbarrier.wait(empty.index(i), (step // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, BYTES)
        _ask_for_weights(inputs, buffers, barrier, i, height, chunk, VARIANT)
        tma.async_copy_global_to_shared(x, [first_row, chunk * 128], barrier, rows.index(i))


@gluon.jit
def _halves(pair):
    low = pair.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _decode(words, headers, SCALED: gl.constexpr):
    """As packed.decode_int4 with FAST: [ROWS, 16, 2, 2, 2]. headers: of SCALED, or zeros twice."""
    ASM: gl.constexpr = SCALED_ASM if SCALED else SHIFTED_ASM
    pairs = gl.inline_asm_elementwise(
        ASM,
        "=&r,=&r,=&r,=r,r,r",
        [words, headers],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    even = gl.join(_halves(pairs[0]), _halves(pairs[2]))
    odd = gl.join(_halves(pairs[1]), _halves(pairs[3]))
    return gl.join(even, odd)


@gluon.jit
def decode_weights(
    buffers, stage, GROUP: gl.constexpr, SCALED: gl.constexpr, VARIANT: gl.constexpr
):
    """A chunk of the rows of a group of warps, as the first operand [ROWS, 128]; its scales [ROWS].

    No number leaves its lane.
    """
    WARPS: gl.constexpr = VARIANT[1]
    REPEATS: gl.constexpr = VARIANT[2]
    ROWS: gl.constexpr = 16 * WARPS * REPEATS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VARIANT[0], 16])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    words, heads, _ = buffers
    place = stage * VARIANT[12] + GROUP
    word = words.index(place).reshape([ROWS, 16]).load(WORDS)
    header = heads.index(place).reshape([ROWS]).load(gl.SliceLayout(1, WORDS))
    zero = header
    if not SCALED:
        zero = gl.inline_asm_elementwise(
            ZERO_ASM, "=r,r", [header], dtype=gl.int32, is_pure=True, pack=1
        )
    zero, _ = gl.broadcast(gl.expand_dims(zero, 1), word)
    # Rows: half, repeat, warp, eight rows. Columns: lane, word, and three bits of the code.
    w = gl.reshape(_decode(word, zero, SCALED), [2, REPEATS, WARPS, 8, 4, 4, 2, 2, 2])
    w = gl.reshape(gl.permute(w, (1, 2, 0, 3, 5, 7, 8, 4, 6)), [ROWS, 128])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)
    s = gl.permute(gl.reshape(header, [2, REPEATS, WARPS, 8]), (1, 2, 0, 3))
    s = (gl.reshape(s, [ROWS]) & -65536).to(gl.float32, bitcast=True)
    return w, gl.convert_layout(s, gl.SliceLayout(1, PRODUCT), assert_trivial=True)


@gluon.jit
def norm_factors(norm, first_row, num_rows, VARIANT: gl.constexpr):
    """The RMSNorm factor of each row of x, from the partial sums of its squares."""
    BM: gl.constexpr = VARIANT[0]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [VARIANT[1], 1], [16, BM, 16])
    squares, num_squares, width, eps = norm
    m = (first_row + gl.arange(0, BM, gl.SliceLayout(0, PRODUCT)))[None, :]
    s = gl.arange(0, VARIANT[10], gl.SliceLayout(1, PRODUCT))[:, None]
    found = gl.load(squares + s * num_rows + m, (m < num_rows) & (s < num_squares), 0.0)
    return gl.rsqrt(gl.sum(found, axis=0) / width + eps)


@gluon.jit
def store(total, bias, out, sums, tile, first_row, N, num_rows, VARIANT: gl.constexpr):
    """Store the tile: gated, added to `out`, or as it is.

    VARIANT[11]: 1 and 2 add. `sums` then gets the sums of the squares of the tile's rows of out
    and, if it is 2, these rows times the weight of the next norm.
    """
    BM: gl.constexpr = VARIANT[0]
    WARPS: gl.constexpr = VARIANT[1]
    GATED: gl.constexpr = VARIANT[6]
    ROWS: gl.constexpr = 16 * WARPS * VARIANT[2]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    HALVES: gl.constexpr = 2 if GATED else 1
    OUT: gl.constexpr = ROWS // HALVES
    r = gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCT))
    m = gl.arange(0, BM, gl.SliceLayout(0, PRODUCT))
    half, group = r // 8 % 2, r // (16 * WARPS) * WARPS + r // 16 % WARPS
    n = half * (ROWS // 2) + group * 8 + r % 8
    if VARIANT[7]:
        n_bias = tile * OUT + n % OUT + n // OUT * (N // 2)
        total += gl.load(bias + n_bias, n_bias < N, 0.0).to(gl.float32)[:, None]
    width, m = N // HALVES, first_row + m
    if GATED:
        # A lane has gate and up of a pair, and so the place of both.
        n = tile * OUT + n % OUT
        inside = (m < num_rows)[None, :] & (n < width)[:, None]
        place = gl.where(inside, m[None, :] * width + n[:, None], -1)
        gate, up = gl.split(gl.permute(gl.reshape(total, [ROWS // 16, 2, 8, BM]), (0, 2, 3, 1)))
        place, _ = gl.split(gl.permute(gl.reshape(place, [ROWS // 16, 2, 8, BM]), (0, 2, 3, 1)))
        value = gate / (1.0 + gl.exp(-gate)) * up
        gl.store(out + place, value.to(out.dtype.element_ty), place >= 0)
    else:
        n = tile * OUT + n
        at = out + m[None, :].to(gl.int64) * width + n[:, None]
        inside = (m < num_rows)[None, :] & (n < width)[:, None]
        if VARIANT[11] > 0:
            total += gl.load(at, inside, 0.0).to(gl.float32)
        rounded = total.to(out.dtype.element_ty)
        gl.store(at, rounded, inside)
        if VARIANT[11] > 0:
            out_squares, next_weight, scaled = sums
            wide = gl.where(inside, rounded.to(gl.float32), 0.0)
            part = gl.sum(wide * wide, axis=0)
            gl.store(out_squares + tile * num_rows + m, part, m < num_rows)
            if VARIANT[11] > 1:
                factor = gl.load(next_weight + n, n < width, 0.0).to(gl.float32)
                at = scaled + m[None, :].to(gl.int64) * width + n[:, None]
                gl.store(at, (wide * factor[:, None]).to(out.dtype.element_ty), inside)
