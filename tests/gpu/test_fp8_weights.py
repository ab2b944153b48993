"""Products with FP8 weights, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter. Its conversion
to FP8 loses the carry of a number that rounds up to a power of two; the tests leave those out.
"""

import math

import pytest
import torch
from torch import Tensor

from minisgl.kernel import fp8_products
from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_products import fp8_add_linear, fp8_linear
from minisgl.kernel.fp8_tilings import EXACT_ROWS, MOST_ROWS, fp8_tiling_for
from minisgl.kernel.fp8_weights import FP8, Scales, dequantise
from minisgl.kernel.tilings import SUMMED_ROWS
from tests.gpu.logprobs import divergences, logprobs_of_chunks
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.parity.fp8_models import build_fp8
from tests.parity.test_engine_parity import prompt_of

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 6e-3
# The few large numbers of `spread` cost the others some of their lowest bits: up to 1.1e-4 of a
# gated product in the interpreter.
EXACT_LIMIT = 1e-3 if INTERPRETED else LIMIT
# Rounding both operands to e4m3 moves a product of random numbers by about 3.6 %.
QUANTISED_LIMIT = 0.12 if INTERPRETED else 0.05
HEIGHT, WIDTH = 256, 512
BLOCKS = [(1, WIDTH), (128, 128), (64, 64), (16, 32), (128, WIDTH)]


def random_weights(*shape: int, blocks: tuple[int, int]) -> tuple[Tensor, Scales]:
    """FP8 weights whose dequantised values are of the order of K ** -0.5."""
    *experts, height, width = shape
    rows, columns = min(blocks[0], height), min(blocks[1], width)
    grid = (*experts, -(-height // rows), -(-width // columns))
    values = (0.5 + torch.rand(grid, device=DEVICE)) * width**-0.5
    return torch.randn(shape, device=DEVICE).to(FP8), Scales(values, rows, columns)


def poison(*shape: int) -> None:
    """Fill memory with NaN and free it, so that the next tensor of this shape starts as NaN."""
    torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE)


def norm_factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def in_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16 as the kernel does. Triton's interpreter truncates and stays in float32."""
    return (x.view(torch.int32) & -(2**16)).view(torch.float32) if INTERPRETED else x.bfloat16()


FUSED = ["", "weight bias", "norm", "norm squares", "norm weight", "norm weight squares"]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("rows", "fused"),
    [
        (rows, fused)
        for rows in (1, SUMMED_ROWS, SUMMED_ROWS + 1, EXACT_ROWS)
        for fused in FUSED
        if rows <= SUMMED_ROWS or "norm" not in fused or "squares" in fused
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_exact_rows(
    rows: int, blocks: tuple[int, int], splits: int, fused: str, gated: bool
) -> None:
    """Each fused operation, with and without split-K. The semaphores are zero afterwards.

    squares: the norm comes with the sums of squares. Else the kernel sums them, which it does for
    few rows only.
    """
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, scales.columns)
    assert tiling is not None
    tiling = tiling._replace(splits=splits, stages=2, ahead=0)
    x = spread(normal(rows, WIDTH + 8, dtype=DTYPE)[:, :WIDTH])
    squares = x.float().square().view(rows, -1, 64).sum(-1).t().contiguous()
    given = squares if "squares" in fused else None
    norm = PendingNorm(1e-6, given) if "norm" in fused else None
    norm_weight = 0.5 + torch.rand(WIDTH, device=DEVICE).to(DTYPE) if "weight" in fused else None
    bias = normal(HEIGHT, dtype=DTYPE) if "bias" in fused else None
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    exact = x.double() if norm_weight is None else in_bfloat16(x * norm_weight).double()
    exact = exact if norm is None else exact * norm_factor(x.double())
    exact = exact @ dequantise(weight, scales, torch.float64).T
    exact = exact if bias is None else exact + bias.double()
    poison(rows, HEIGHT // 2 if gated else HEIGHT)
    operands = (x, None, weight, scales, bias, semaphores, tiling, norm, norm_weight)
    found = kernels.linear(*operands, gated=gated, dtype=DTYPE)
    assert error(found, silu_and_mul(exact) if gated else exact) < EXACT_LIMIT
    again = kernels.linear(*operands, gated=gated, dtype=DTYPE)
    assert torch.equal(again, found), "a second run differs"
    assert not semaphores.any()


def spread(x: Tensor) -> Tensor:
    """x in bfloat16, with 1 % of its elements multiplied by up to 256."""
    factors = 2.0 ** torch.randint(0, 9, x.shape, device=x.device)
    return (
        (x * torch.where(torch.rand(x.shape, device=x.device) < 0.01, factors, 1)).bfloat16().to(x)
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan(bad: float) -> None:
    """NaN lets the sampler end the request with an error. Other rows are not affected."""
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=(1, WIDTH))
    tiling = fp8_tiling_for(3, HEIGHT, WIDTH, WIDTH)
    assert tiling is not None
    x = normal(3, WIDTH, dtype=DTYPE)
    x[1, 130] = bad
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    found = kernels.linear(x, None, weight, scales, None, semaphores, tiling, dtype=DTYPE)
    assert torch.equal(found.isnan().any(1).cpu(), torch.tensor([False, True, False]))
    assert found[1].isnan().all()


@pytest.mark.parametrize("blocks", [(1, WIDTH), (128, WIDTH), (128, 128)])
@pytest.mark.parametrize("rows", [9, 31, 64, 128, 200])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_quantised_products(
    rows: int, blocks: tuple[int, int], splits: int, biased: bool, gated: bool
) -> None:
    """The kernel multiplies the numbers that it is given exactly."""
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, scales.columns)
    assert tiling is not None
    tiling = tiling._replace(splits=splits, stages=2, ahead=0)
    x, x_scales = fp8_products.quantise_rows(normal(rows, WIDTH), scales.columns < WIDTH)
    wide = x[:rows].double() * x_scales[:rows].double().repeat_interleave(
        WIDTH // x_scales.shape[1], 1
    )
    bias = normal(HEIGHT, dtype=DTYPE) if biased else None
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    exact = wide @ dequantise(weight, scales, torch.float64).T
    exact = exact if bias is None else exact + bias.double()
    poison(rows, HEIGHT // 2 if gated else HEIGHT)
    operands = (x[:rows], x_scales, weight, scales, bias, semaphores, tiling)
    found = kernels.linear(*operands, gated=gated, dtype=DTYPE)
    assert error(found, silu_and_mul(exact) if gated else exact) < LIMIT
    assert not semaphores.any()


@pytest.mark.parametrize("blocks", BLOCKS[:3])
@pytest.mark.parametrize("rows", [1, EXACT_ROWS])
@pytest.mark.parametrize("splits", [1, 2])
def test_exact_rows_are_added_and_their_squares_summed(
    rows: int, blocks: tuple[int, int], splits: int
) -> None:
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, scales.columns)
    assert tiling is not None
    tiling = tiling._replace(splits=splits, stages=2, ahead=0)
    x, residual = spread(normal(rows, WIDTH, dtype=DTYPE)), normal(rows, HEIGHT, dtype=DTYPE)
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    exact = residual.double() + x.double() @ dequantise(weight, scales, torch.float64).T
    out, squares = kernels.add_linear(residual, x, None, weight, scales, None, semaphores, tiling)
    assert out is residual
    assert error(out, exact) < EXACT_LIMIT
    torch.testing.assert_close(squares.sum(0), out.float().square().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 100])
def test_quantised_rows_are_added_and_their_squares_summed(rows: int) -> None:
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=(1, WIDTH))
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, WIDTH)
    assert tiling is not None
    x, x_scales = fp8_products.quantise_rows(normal(rows, WIDTH), False)
    x, residual = x[:rows], normal(rows, HEIGHT, dtype=DTYPE)
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    wide = x.double() * x_scales[:rows].double()
    exact = residual.double() + wide @ dequantise(weight, scales, torch.float64).T
    given = (residual, x, x_scales, weight, scales, None, semaphores, tiling)
    out, squares = kernels.add_linear(*given)
    assert error(out, exact) < LIMIT
    torch.testing.assert_close(squares.sum(0), out.float().square().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 384), (7, 1000), (66, 128), (2, 17408)])
@pytest.mark.parametrize("before", ["nothing", "norm", "weight", "both", "sum", "silu"])
def test_quantised_rows(rows: int, width: int, grouped: bool, before: str) -> None:
    """The kernel and the reference agree, up to one step of e4m3 where rounding differs."""
    from minisgl.kernel.triton import fp8_quantise as kernels

    x = normal(rows, 2 * width if before == "silu" else width, dtype=DTYPE) * 3
    norm = on_cpu = PendingNorm(1e-6) if before in ("norm", "both", "sum") else None
    if before == "sum":
        addend = normal(rows, width, dtype=DTYPE) * 3
        norm, on_cpu = (PendingNorm(1e-6, addend=one) for one in (addend, addend.cpu().clone()))
    norm_weight = 0.5 + torch.rand(width, device=DEVICE).to(DTYPE)
    weight = norm_weight if before in ("weight", "both", "sum") else None
    x_on_cpu = x.cpu().clone()
    poison(-(-rows // 4) * 2, width)
    stored, scales = kernels.quantise_rows(x, grouped, norm, weight, before == "silu")
    assert stored.shape == (-(-rows // 4) * 4, width)
    assert scales.stride(0) == 1
    given = (None if weight is None else weight.cpu(), before == "silu")
    exact, exact_scales = fp8_products.quantise_rows(x_on_cpu, grouped, on_cpu, *given)
    assert torch.equal(x.cpu(), x_on_cpu), "the residual gets the addend, and else stays"
    torch.testing.assert_close(scales[:rows].cpu(), exact_scales, rtol=1e-2, atol=0)
    found, wanted = stored[:rows].cpu().float(), exact.float()
    carried = wanted.abs().log2().frac() == 0 if INTERPRETED else torch.zeros_like(wanted).bool()
    step = wanted.abs().clamp_min(2**-6) / 8
    assert ((found - wanted).abs() <= step)[~carried].all()
    assert (found == wanted)[~carried].float().mean() > 0.9


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no fused multiply-add")
def test_quotients_are_rounded_as_those_of_a_division() -> None:
    """All pairs of a row's largest number and a smaller one, up to powers of two."""
    from minisgl.kernel.triton import fp8_quantise as kernels

    mantissas = torch.arange(128, 256) / 128
    smaller = (mantissas * 2.0 ** -torch.arange(1, 17)[:, None]).flatten()
    x = torch.cat((mantissas[:, None], smaller.expand(128, -1)), 1).bfloat16()
    stored, scales = kernels.quantise_rows(x.to(DEVICE), False)
    exact, exact_scales = fp8_products.quantise_rows(x, False)
    assert torch.equal(scales.cpu(), exact_scales)
    assert torch.equal(stored.cpu().view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("before", ["nothing", "norm", "silu"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_number_that_is_not_finite_stays_so_when_it_is_quantised(
    grouped: bool, before: str, bad: float
) -> None:
    """The sampler then finds the request. Other rows, and other groups, are not affected."""
    from minisgl.kernel.triton import fp8_quantise as kernels

    x = normal(3, 512 if before == "silu" else 256, dtype=DTYPE)
    x[1, 130] = bad
    given = (grouped, PendingNorm(1e-6) if before == "norm" else None, None, before == "silu")
    whole = not grouped or (before == "norm" and math.isnan(bad))  # a norm of NaN makes its row NaN
    hit = torch.zeros(3, 256, dtype=torch.bool)
    hit[1, 0 if whole else 128 :] = True
    for run, where in ((kernels.quantise_rows, x), (fp8_products.quantise_rows, x.cpu())):
        stored, scales = run(where, *given)
        wide = scales[:3].cpu().repeat_interleave(256 // scales.shape[1], 1)
        assert torch.equal((stored[:3].cpu().float() * wide).isnan(), hit)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("blocks", [(1, WIDTH), (128, 128), (64, 64)])
@pytest.mark.parametrize(
    "rows", [1, EXACT_ROWS, EXACT_ROWS + 1, 64, 128, 129, MOST_ROWS, MOST_ROWS + 1, 1000]
)
def test_linears_of_any_number_of_rows(rows: int, blocks: tuple[int, int]) -> None:
    """The functions that layers call: our kernel, torch's product or dequantised weights."""
    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    x, bias = normal(rows, WIDTH, dtype=DTYPE), normal(HEIGHT, dtype=DTYPE)
    norm_weight = 0.5 + torch.rand(WIDTH, device=DEVICE).to(DTYPE)
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    dense = dequantise(weight, scales, torch.float64)
    wide = x.double() * norm_factor(x.double()) * norm_weight.double()
    exact = wide @ dense.T + bias.double()
    limit = QUANTISED_LIMIT if rows > EXACT_ROWS and blocks != (64, 64) else LIMIT
    given = (x, weight, scales, bias, semaphores, PendingNorm(1e-6), norm_weight)
    assert error(fp8_linear(*given), exact) < limit
    assert error(fp8_linear(*given, gated=True), silu_and_mul(exact)) < limit
    residual = normal(rows, HEIGHT, dtype=DTYPE)
    total = residual.double() + x.double() @ dense.T
    out, rest, _ = fp8_add_linear(residual, x, weight, scales, None, semaphores)
    assert error(out if rest is None else rest + out, total) < limit


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("form", ["block", "compressed-channel", "modelopt", "online"])
def test_a_model_gives_the_logits_of_its_dequantised_weights(
    form: str, family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A prompt in chunks of many and of few tokens, in bfloat16 with CUDA graphs."""
    saved = build_fp8("block" if form == "online" else form, family, tmp_path_factory.mktemp("m"))
    online = form == "online"
    given = (prompt_of(sum(CHUNKS)), CHUNKS)
    exact = logprobs_of_chunks(saved.reference, *given, dtype="bfloat16")
    model, quantization = (saved.reference, "fp8") if online else (saved.fp8, None)
    found = logprobs_of_chunks(model, *given, dtype="bfloat16", quantization=quantization)
    for part in torch.split(divergences(exact, found), CHUNKS):
        assert 0 < part.mean() < MOST_DIVERGENCE


# 150 rows run torch's products; 40 and 9 our kernel, quantised; 1 our kernel, exact.
CHUNKS = [150, 40, 9, 1]
MOST_DIVERGENCE = 0.3  # another position of the prompt differs by 2
