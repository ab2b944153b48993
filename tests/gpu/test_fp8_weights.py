"""Products and experts with FP8 weights, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter. Its conversion
to FP8 loses the carry of a number that rounds up to a power of two; the tests leave those out.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import EngineConfig
from minisgl.core.batch import LogprobsRequest
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.kernel import (
    PendingNorm,
    fp8_add_linear,
    fp8_gated_linear,
    fp8_linear,
    fp8_products,
    silu_and_mul,
)
from minisgl.kernel.fp8_tilings import FEW_ROWS, fp8_tiling_for
from minisgl.kernel.fp8_weights import FP8, Scales, dequantise
from minisgl.moe.base import ExpertWeights, route
from minisgl.moe.torch_backend import TorchMoe
from minisgl.quantization import with_quantizations
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.parity.driver import Driver, Work
from tests.parity.fp8_models import build_fp8
from tests.parity.test_engine_parity import prompt_of

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 6e-3
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


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("fused", [frozenset(), {"norm"}, {"weight", "bias"}, {"norm", "weight"}])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows(
    rows: int, blocks: tuple[int, int], splits: int, fused: frozenset[str], gated: bool
) -> None:
    """Each fused operation, with and without split-K. The semaphores are zero afterwards."""
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, scales.columns)
    assert tiling is not None
    tiling = tiling._replace(splits=splits, stages=2, ahead=0)
    x = normal(rows, WIDTH + 8, dtype=DTYPE)[:, :WIDTH]
    squares = x.float().square().view(rows, -1, 64).sum(-1).t().contiguous()
    norm = PendingNorm(1e-6, squares) if "norm" in fused else None
    norm_weight = 0.5 + torch.rand(WIDTH, device=DEVICE).to(DTYPE) if "weight" in fused else None
    bias = normal(HEIGHT, dtype=DTYPE) if "bias" in fused else None
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    exact = x.double() if norm is None else normalised(x.double())
    exact = exact if norm_weight is None else exact * norm_weight.double()
    exact = exact @ dequantise(weight, scales, torch.float64).T
    exact = exact if bias is None else exact + bias.double()
    poison(rows, HEIGHT // 2 if gated else HEIGHT)
    operands = (x, weight, scales, bias, semaphores, tiling, norm, norm_weight)
    found = kernels.linear(*operands, gated=gated)
    assert error(found, silu_and_mul(exact) if gated else exact) < LIMIT
    assert torch.equal(kernels.linear(*operands, gated=gated), found), "a second run differs"
    assert not semaphores.any()


@pytest.mark.parametrize("blocks", BLOCKS[:3])
@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("splits", [1, 2])
def test_few_rows_are_added_and_their_squares_summed(
    rows: int, blocks: tuple[int, int], splits: int
) -> None:
    from minisgl.kernel.triton import fp8_linear as kernels

    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    tiling = fp8_tiling_for(rows, HEIGHT, WIDTH, scales.columns)
    assert tiling is not None
    tiling = tiling._replace(splits=splits, stages=2, ahead=0)
    x, residual = normal(rows, WIDTH, dtype=DTYPE), normal(rows, HEIGHT, dtype=DTYPE)
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    exact = residual.double() + x.double() @ dequantise(weight, scales, torch.float64).T
    out, squares = kernels.add_linear(residual, x, weight, scales, None, semaphores, tiling)
    assert out is residual
    assert error(out, exact) < LIMIT
    torch.testing.assert_close(squares.sum(0), out.float().square().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_all_numbers_convert_exactly() -> None:
    """The integer conversion of the kernel equals torch's, for every code but the NaN codes."""
    from minisgl.kernel.triton import fp8_linear as kernels

    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(FP8)
    finite = torch.where(codes.float().isnan(), 0.0, codes.float()).to(FP8)
    weight = torch.zeros(64, 256, dtype=FP8, device=DEVICE)
    weight[0] = finite
    scales = Scales(torch.ones(64, 1, device=DEVICE), 1, 256)
    tiling = fp8_tiling_for(64, 64, 256, 256)
    assert tiling is not None
    semaphores = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for half in range(4):
        x = torch.zeros(64, 256, dtype=DTYPE, device=DEVICE)
        x[torch.arange(64), half * 64 + torch.arange(64)] = 1.0
        out = kernels.linear(x, weight, scales, None, semaphores, tiling, None, None, gated=False)
        assert torch.equal(out[:, 0].float(), finite.float()[half * 64 : half * 64 + 64])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 384), (7, 1000), (66, 128)])
@pytest.mark.parametrize("before", ["nothing", "norm", "weight", "both", "silu"])
def test_quantised_rows(rows: int, width: int, grouped: bool, before: str) -> None:
    """The kernel and the reference agree, up to one step of e4m3 where rounding differs."""
    from minisgl.kernel.triton import fp8_quantise as kernels

    x = normal(rows, 2 * width if before == "silu" else width, dtype=DTYPE) * 3
    eps = 1e-6 if before in ("norm", "both") else None
    norm_weight = 0.5 + torch.rand(width, device=DEVICE).to(DTYPE)
    given = (grouped, eps, norm_weight if before in ("weight", "both") else None, before == "silu")
    stored, scales = kernels.quantise_rows(x, *given)
    assert stored.shape == (-(-rows // 4) * 4, width)
    assert scales.stride(0) == 1
    on_cpu = (one.cpu() if isinstance(one, Tensor) else one for one in given)
    exact, exact_scales = fp8_products.quantise_rows(x.cpu(), *on_cpu)
    torch.testing.assert_close(scales[:rows].cpu(), exact_scales, rtol=1e-2, atol=0)
    found, wanted = stored[:rows].cpu().float(), exact.float()
    carried = wanted.abs().log2().frac() == 0 if INTERPRETED else torch.zeros_like(wanted).bool()
    step = wanted.abs().clamp_min(2**-6) / 8
    assert ((found - wanted).abs() <= step)[~carried].all()
    assert (found == wanted)[~carried].float().mean() > 0.9


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
    given = (grouped, 1e-6 if before == "norm" else None, None, before == "silu")
    whole = not grouped or (before == "norm" and math.isnan(bad))  # a norm of NaN makes its row NaN
    hit = torch.zeros(3, 256, dtype=torch.bool)
    hit[1, 0 if whole else 128 :] = True
    for run, where in ((kernels.quantise_rows, x), (fp8_products.quantise_rows, x.cpu())):
        stored, scales = run(where, *given)
        wide = scales[:3].cpu().repeat_interleave(256 // scales.shape[1], 1)
        assert torch.equal((stored[:3].cpu().float() * wide).isnan(), hit)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("blocks", [(1, WIDTH), (128, 128), (64, 64)])
@pytest.mark.parametrize("rows", [1, 64, FEW_ROWS + 1, 131, 256, 1000])
def test_linears_of_any_number_of_rows(rows: int, blocks: tuple[int, int]) -> None:
    """The functions that layers call: our kernel, torch's product or dequantised weights."""
    weight, scales = random_weights(HEIGHT, WIDTH, blocks=blocks)
    x, bias = normal(rows, WIDTH, dtype=DTYPE), normal(HEIGHT, dtype=DTYPE)
    norm_weight = 0.5 + torch.rand(WIDTH, device=DEVICE).to(DTYPE)
    semaphores = torch.zeros(HEIGHT, dtype=torch.int32, device=DEVICE)
    dense = dequantise(weight, scales, torch.float64)
    exact = (normalised(x.double()) * norm_weight.double()) @ dense.T + bias.double()
    limit = QUANTISED_LIMIT if rows > FEW_ROWS else LIMIT
    given = (x, weight, scales, bias, semaphores, PendingNorm(1e-6), norm_weight)
    assert error(fp8_linear(*given), exact) < limit
    assert error(fp8_gated_linear(*given), silu_and_mul(exact)) < limit
    residual = normal(rows, HEIGHT, dtype=DTYPE)
    total = residual.double() + x.double() @ dense.T
    out, _ = fp8_add_linear(residual, x, weight, scales, None, semaphores)
    assert error(out, total) < limit


@pytest.mark.parametrize("blocks", [(1, 1024), (128, 128), (32, 32)])
@pytest.mark.parametrize(
    ("tokens", "experts", "width", "inner"), [(1, 4, 256, 96), (3, 8, 160, 64)]
)
@pytest.mark.parametrize("many", [False, True])
def test_experts(
    tokens: int, experts: int, width: int, inner: int, blocks: tuple[int, int], many: bool
) -> None:
    """Few tokens as matrix-vector products, and blocks of tokens; tiles do not divide the sizes."""
    from minisgl.kernel.triton import fp8_moe as kernels

    weights = random_experts(experts, width, inner, blocks)
    assert weights.scales is not None
    x, top_k = normal(tokens, width, dtype=DTYPE), 2
    exact = reference(x, weights, top_k)
    if many:
        routing = routed(x, weights, top_k)
        found = kernels.experts_of_many(x, *weights[1:3], weights.scales, *routing, False)
    else:
        semaphores = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        given = (x, *weights[:3], weights.scales, semaphores, top_k, True)
        found = kernels.experts_of_few(*given)
        assert not semaphores.any()
    assert error(found, exact) < (1e-5 if INTERPRETED else 1.5e-2)


@pytest.mark.parametrize("blocks", [(1, 1024), (128, 128)])
def test_experts_of_many_tokens_with_quantised_activations(blocks: tuple[int, int]) -> None:
    from minisgl.kernel.triton import fp8_moe as kernels

    tokens, experts, width, inner = (5, 4, 256, 128) if INTERPRETED else (2000, 8, 1024, 384)
    weights = random_experts(experts, width, inner, blocks)
    assert weights.scales is not None
    x = normal(tokens, width, dtype=DTYPE)
    routing = routed(x, weights, 2)
    found = kernels.experts_of_many(x, *weights[1:3], weights.scales, *routing, True)
    assert error(found, reference(x, weights, 2)) < 2 * QUANTISED_LIMIT


def random_experts(experts: int, width: int, inner: int, blocks: tuple[int, int]) -> ExpertWeights:
    gate_up, gate_up_scales = random_weights(experts, 2 * inner, width, blocks=blocks)
    down, down_scales = random_weights(experts, width, inner, blocks=blocks)
    router = normal(experts, width, dtype=DTYPE) * width**-0.5
    return ExpertWeights(router, gate_up, down, (gate_up_scales, down_scales))


def routed(x: Tensor, weights: ExpertWeights, top_k: int) -> tuple[Tensor, Tensor]:
    factors, experts = route(x @ weights.router.T, top_k, True)
    return factors.contiguous(), experts.int().contiguous()


def reference(x: Tensor, weights: ExpertWeights, top_k: int) -> Tensor:
    """The experts one after the other in float64, on the CPU; the routing is that of x's dtype."""
    assert weights.scales is not None
    wide = (
        dequantise(matrix, scales, torch.float64).cpu()
        for matrix, scales in zip(weights[1:3], weights.scales, strict=True)
    )
    factors, experts = (one.cpu() for one in routed(x, weights, top_k))
    gate_up, down = wide
    x = x.cpu().double()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for factor, expert in zip(factors[token], experts[token], strict=True):
            hidden = silu_and_mul(x[token] @ gate_up[expert].T)
            out[token] += factor.double() * (hidden @ down[expert].T)
    return out.to(DEVICE)


def test_the_reference_of_experts_is_the_torch_backend() -> None:
    weights = random_experts(4, 256, 96, (32, 32))
    x = normal(7, 256)
    own = TorchMoe(torch.device(DEVICE)).forward(
        x, weights._replace(router=weights.router.float()), 2, renormalise=True
    )
    wide = weights._replace(router=weights.router.float())
    assert error(own, reference(x, wide, 2)) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("form", ["block", "compressed-channel", "modelopt", "online"])
def test_a_model_gives_the_logits_of_its_dequantised_weights(
    form: str, family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A prompt in chunks of many and of few tokens, in bfloat16 with CUDA graphs."""
    saved = build_fp8("block" if form == "online" else form, family, tmp_path_factory.mktemp("m"))
    online = form == "online"
    exact = logprobs_of_chunks(saved.reference, None)
    found = logprobs_of_chunks(saved.reference if online else saved.fp8, "fp8" if online else None)
    divergences = (exact.exp() * (exact - found)).sum(-1)
    for part in divergences.split(CHUNKS):
        assert 0 < part.mean() < MOST_DIVERGENCE


# The first chunk is quantised for torch's products. Our kernel multiplies the others.
CHUNKS = [150, 40, 9, 1]
MOST_DIVERGENCE = 0.3  # another position of the prompt differs by 2


def logprobs_of_chunks(model: str, quantization: str | None) -> Tensor:
    """The log-probabilities of every id after each token of one prompt, float64 [T, V]."""
    config = EngineConfig(
        model_path=model,
        device="cuda",
        dtype="bfloat16",
        quantization=quantization,
        num_pages=64,
        max_running_reqs=4,
    )
    engine = Engine(config, SingleCommunicator(), extensions=with_quantizations())
    vocabulary, driver, start = engine.facts().vocab_size, Driver(engine), 0
    ids, parts = prompt_of(sum(CHUNKS)), []
    for size in CHUNKS:
        wanted = LogprobsRequest(
            sampled=np.full(1, -1, dtype=np.int32),
            prompt=np.full(1, vocabulary, dtype=np.int32),
            prompt_targets=np.full(size, -1, dtype=np.int32),
        )
        found = driver.step(Work(0, start, ids[start : start + size]), logprobs=wanted)
        assert found.prompt_logprobs is not None
        of_chunk = found.prompt_logprobs[0]
        part = np.empty((size, vocabulary))
        np.put_along_axis(part, of_chunk.top_ids.astype(np.int64), of_chunk.top, axis=1)
        parts.append(torch.from_numpy(part))
        start += size
    engine.close()
    return torch.cat(parts)
