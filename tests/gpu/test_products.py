"""Products of few rows by minisgl's kernels, with every operation that can be fused into them.

The tests compare with float64 on fresh random input. With TRITON_INTERPRET=1 they run on CPU in
float32, without the kernel for more than 32 rows, because Gluon has no interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.kernel.dispatch import add_linear, linear, rms_norm
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.tilings import Tiling, tiling_for
from tests.gpu.graphs import equal_in_a_graph
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 6e-3
FEW = (  # one tile holds all rows
    Tiling(16, 64, 128, 1, 4, 4, 256),
    Tiling(16, 64, 128, 8, 3, 4, 128),
    Tiling(32, 64, 256, 1, 3, 4, 0),
    Tiling(32, 64, 128, 2, 5, 4, 512),
    Tiling(32, 64, 64, 1, 16, 4, 256),  # for widths that 128 does not divide
)
MANY = (  # in Gluon, which has no interpreter
    Tiling(64, 64, 64, 1, 4, 4, 0),
    Tiling(64, 64, 128, 4, 4, 4, 0),
    Tiling(64, 64, 128, 2, 6, 4, 0),
    Tiling(64, 128, 128, 1, 4, 8, 0),
    Tiling(128, 128, 64, 1, 6, 8, 0),
)
CASES = [
    *((rows, tiling) for tiling in FEW for rows in (1, 16, 23, 32) if rows <= tiling.rows),
    *((n, t) for t in MANY for n in (1, 16, 23, 32, 64, 65, 128, 200, 256) if not INTERPRETED),
]
TILINGS = pytest.mark.parametrize(
    ("rows", "tiling"),
    CASES,
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, Tiling) else str(each),
)
WIDTH, HEIGHT = 2048, 512


def zero_semaphores() -> Tensor:
    return torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)


def poison(*shape: int) -> None:
    """Fill memory with NaN and free it, so that the next tensor of this shape starts as NaN."""
    torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@TILINGS
@pytest.mark.parametrize(
    ("gated", "normed", "biased"),
    [(False, False, False), (False, True, True), (True, False, False), (True, True, True)],
    ids=["plain", "normed-bias", "gated", "normed-gated-bias"],
)
def test_linear(tiling: Tiling, rows: int, gated: bool, normed: bool, biased: bool) -> None:
    """Two calls with the same semaphores agree, and each call leaves zeros in them."""
    run_linear(tiling, rows, gated, normed, biased, True)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("tiling", FEW, ids=lambda tiling: "-".join(map(str, tiling)))
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_linear_sums_the_squares_of_few_rows(tiling: Tiling, rows: int, gated: bool) -> None:
    run_linear(tiling, rows, gated, True, False, False)


def run_linear(
    tiling: Tiling, rows: int, gated: bool, normed: bool, biased: bool, given: bool
) -> None:
    """given: whether the norm comes with the sums of squares; else the kernel sums them."""
    from minisgl.kernel.triton import linear as kernels

    wider = normal(rows, 2 * WIDTH, dtype=DTYPE) * 3
    x, weight = wider[:, WIDTH:], normal(HEIGHT, WIDTH, dtype=DTYPE) / WIDTH**0.5
    bias = normal(HEIGHT, dtype=DTYPE) if biased else None
    wide, pending = x.double(), None
    if normed:
        squares = wide.square().view(rows, 32, -1).sum(-1).t().float().contiguous()
        wide, pending = norm(wide), PendingNorm(1e-6, squares if given else None)
    expected = wide @ weight.double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    semaphores = zero_semaphores()
    outs = []
    for _ in range(2):
        poison(rows, HEIGHT // 2 if gated else HEIGHT)
        outs.append(kernels.linear(x, weight, bias, semaphores, tiling, pending, gated))
    assert error(outs[0], expected) < LIMIT
    assert torch.equal(*outs)
    assert not semaphores.any()


@TILINGS
def test_add_linear_returns_the_squares_of_the_sum(tiling: Tiling, rows: int) -> None:
    from minisgl.kernel.triton import linear as kernels

    x, weight = normal(rows, WIDTH, dtype=DTYPE), normal(HEIGHT, WIDTH, dtype=DTYPE) / 32
    before, bias = normal(rows, HEIGHT, dtype=DTYPE) * 5, normal(HEIGHT, dtype=DTYPE)
    expected = before.double() + x.double() @ weight.double().T + bias.double()
    semaphores = zero_semaphores()
    results = []
    for _ in range(2):
        residual = before.clone()
        total, squares = kernels.add_linear(residual, x, weight, bias, semaphores, tiling)
        assert total is residual
        assert squares.shape == (HEIGHT // tiling.height, rows)
        assert error(total, expected) < LIMIT
        assert error(squares.sum(0), total.double().square().sum(-1)) < 1e-5
        results.append((total, squares))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not semaphores.any()


@pytest.mark.parametrize("rows", [1, 16, 32])
def test_a_width_that_128_does_not_divide(rows: int) -> None:
    """The product of queries, keys and values of gpt-oss-20b, by the rule."""
    height, width = (320, 576) if INTERPRETED else (5120, 2880)
    x, weight = normal(rows, width, dtype=DTYPE), normal(height, width, dtype=DTYPE) / width**0.5
    bias, tiling = normal(height, dtype=DTYPE), tiling_for(rows, height, width)
    assert tiling is not None
    assert tiling.columns == 64
    from minisgl.kernel.triton import linear as kernels

    semaphores = torch.zeros(height // 8, dtype=torch.int32, device=DEVICE)
    out = kernels.linear(x, weight, bias, semaphores, tiling, None, False)
    assert error(out, x.double() @ weight.double().T + bias.double()) < LIMIT


@pytest.mark.parametrize("rows", [1, 5, 32, 100, 250])
def test_overlapped_kernels_see_what_came_before(rows: int) -> None:
    """A long chain of kernels that overlap in a graph is equal to the chain with waits between.

    The results are equal to the bit, and close to the results in float64.
    """
    if INTERPRETED:
        pytest.skip("the interpreter has no CUDA graphs")
    up = [normal(6144, 1024, dtype=DTYPE) / 32 for _ in range(24)]
    down = [normal(1024, 3072, dtype=DTYPE) / 32 for _ in range(24)]
    semaphores = torch.zeros(768, dtype=torch.int32, device=DEVICE)
    start = normal(rows, 1024, dtype=DTYPE)

    def chain(pause: Callable[[], object]) -> Tensor:
        stream, squares = start.clone(), None
        for first, second in zip(up, down, strict=True):
            norm = PendingNorm(1e-6, squares)
            hidden = linear(stream, first, None, semaphores, norm, gated=True)
            pause()
            stream, squares = add_linear(stream, hidden, second, None, semaphores)
            pause()
        return linear(rms_norm(stream, None, 1e-6), up[0], None, semaphores)

    expected = equal_in_a_graph(chain)
    exact = start.double()
    for first, second in zip(up, down, strict=True):
        gate, value = (norm(exact) @ first.double().T).chunk(2, dim=-1)
        exact += (torch.nn.functional.silu(gate) * value) @ second.double().T
    # The error is that of 48 roundings to bfloat16.
    assert error(expected, norm(exact) @ up[0].double().T) < 3e-2
