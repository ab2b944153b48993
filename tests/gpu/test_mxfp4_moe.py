"""The experts of gpt-oss in MXFP4 and in x's dtype, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.kernel.activation import ClampedSwiglu
from minisgl.kernel.mxfp4_weights import by_chunks, dequantise, recode
from minisgl.moe.base import ExpertMatrix, ExpertWeights, Router, route
from minisgl.moe.torch_backend import TorchMoe
from minisgl.moe.triton_backend import TritonMoe
from tests.gpu.logprobs import divergences, logprobs_of_chunks
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.gpu.test_moe import poisoned
from tests.parity.driver import Driver, make_engine
from tests.parity.test_engine_parity import prompt_of
from tests.parity.test_mxfp4_parity import build

triton = pytest.importorskip("triton", reason="needs Triton")
tl = pytest.importorskip("triton.language", reason="needs Triton")
mxfp4 = pytest.importorskip("minisgl.kernel.triton.mxfp4", reason="needs Triton")
packed_blocks = pytest.importorskip("minisgl.kernel.triton.packed_blocks", reason="needs Triton")
mxfp4_few = pytest.importorskip("minisgl.kernel.triton.mxfp4_few", reason="needs Triton")

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 1.5e-2
SWIGLU = ClampedSwiglu(1.702, 7.0)
TOP_K = 2


@triton.jit  # type: ignore[untyped-decorator]
def _decode_words(words, scales, out, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, 16)[:, None]
    word = tl.load(words + row * 4 + tl.arange(0, 4)[None, :])
    power = tl.load(scales + tl.program_id(0) * 16 + row)
    numbers = mxfp4.decode_words(word, power, out.dtype.element_ty, FAST)
    at = (tl.program_id(0) * 16 + row) * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, tl.reshape(numbers, [16, 32]))


def packed_matrix(experts: int, rows: int, columns: int, bias: Tensor) -> ExpertMatrix:
    """Every code and random powers of two, with weights of the order of columns ** -0.5."""
    shape = (experts, rows, columns // 2)
    codes = torch.randint(0, 256, shape, device=DEVICE, dtype=torch.uint8)
    middle = 127 - 2 - round(torch.log2(torch.tensor(float(columns))).item() / 2)
    shape = (experts, rows, columns // 32)
    scales = torch.randint(middle - 2, middle + 2, shape, device=DEVICE, dtype=torch.uint8)
    return ExpertMatrix(by_chunks(codes, 16).contiguous(), by_chunks(scales, 1).contiguous(), bias)


def layer(experts: int, width: int, inner: int) -> ExpertWeights:
    gate_up_bias, down_bias = normal(experts, 2 * inner), normal(experts, width)
    return ExpertWeights(
        packed_matrix(experts, 2 * inner, width, (4 * gate_up_bias).to(DTYPE)),
        packed_matrix(experts, width, inner, down_bias.to(DTYPE)),
        SWIGLU,
    )


def router_of(experts: int, width: int, top_k: int = TOP_K) -> Router:
    """A random router. Its logits are mostly below 1.

    The kernels and the reference add the products of the router in different orders, so the logits
    may differ by one bfloat16 step. A step of a logit above 2 is 1/64 or more.
    """
    weight = normal(experts, width, dtype=DTYPE) * width**-0.5 / 4
    return Router(weight, normal(experts, dtype=DTYPE) / 4, top_k, True)


def dequantised(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    gate_up, down, swiglu = weights
    width, inner = down.values.shape[2], gate_up.values.shape[2] // 2
    return ExpertWeights(gate_up.dequantised(width, dtype), down.dequantised(inner, dtype), swiglu)


def expected(x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
    """The experts one after the other in float64; the routing is that of x's dtype."""
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    factors, experts = route(logits, router)
    gate_up, down, _ = dequantised(weights, torch.float64)
    assert gate_up.bias is not None
    assert down.bias is not None
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for factor, expert in zip(factors[token], experts[token].tolist(), strict=True):
            rows = gate_up.values[expert] @ x[token].double() + gate_up.bias[expert].double()
            gate, up = rows.chunk(2)
            gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
            hidden = (up + 1) * gate * torch.sigmoid(SWIGLU.alpha * gate)
            product = down.values[expert] @ hidden + down.bias[expert].double()
            out[token] += factor.double() * product
    return out


SHAPES = [(1, 4, 96, 32), (4, 4, 64, 32), (5, 8, 160, 64), (40, 4, 64, 544)]
if not INTERPRETED:
    SHAPES += [(1, 32, 2880, 2880), (64, 32, 2880, 1440), (600, 8, 1440, 736), (4000, 4, 512, 512)]


@pytest.mark.parametrize(("tokens", "experts", "width", "inner"), SHAPES)
@pytest.mark.parametrize("packed", [True, False])
def test_experts(tokens: int, experts: int, width: int, inner: int, packed: bool) -> None:
    """Tiles divide neither the sizes nor the blocks of tokens."""
    weights, router = layer(experts, width, inner), router_of(experts, width)
    x = normal(tokens, width, dtype=DTYPE)
    exact = expected(x, router, weights)
    given = weights if packed else dequantised(weights, DTYPE)
    backend = TritonMoe(torch.device(DEVICE))
    first = backend.forward(x, router, given)
    assert error(first, exact) < LIMIT
    assert torch.equal(first, backend.forward(x, router, given))


BLOCKS = [(8, 4, 96, 544), (20, 10, 160, 64)]
if not INTERPRETED:
    BLOCKS += [(32, 16, 2880, 2880), (64, 64, 2880, 1440), (300, 8, 1440, 736)]
TILINGS = [tiling for _, tiling in packed_blocks.TILINGS]


@pytest.mark.parametrize(("tokens", "experts", "width", "inner"), BLOCKS)
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: str(tiling.tokens))
def test_experts_of_many(
    tokens: int, experts: int, width: int, inner: int, tiling: packed_blocks.Tiling
) -> None:
    """Expert 1 has all tokens, in one or several blocks. Expert 0 has none."""
    weights, router = layer(experts, width, inner), router_of(experts, width)
    x = normal(tokens, width + 64, dtype=DTYPE)[:, :width]
    assert router.bias is not None
    router.bias[0], router.bias[1] = -50, 50
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    factors, chosen = route(logits, router)
    routing = (factors.float().contiguous(), chosen.int().contiguous())

    def forward() -> Tensor:
        with poisoned():
            out: Tensor = packed_blocks.experts_of_many(x, weights, *routing, tiling=tiling)
        return out

    first = forward()
    assert error(first, expected(x, router, weights)) < LIMIT
    assert torch.equal(first, forward())


FEW = [(1, 4, 96, 32, 2), (8, 4, 160, 64, 1), (2, 5, 64, 288, 3), (3, 4, 128, 672, 4)]
if not INTERPRETED:
    FEW += [(1, 32, 2880, 2880, 4), (8, 32, 2880, 2880, 4), (3, 64, 2880, 1440, 4)]


@pytest.mark.parametrize(("tokens", "experts", "width", "inner", "top_k"), FEW)
@pytest.mark.parametrize("same", [False, True])
def test_experts_of_few(
    tokens: int, experts: int, width: int, inner: int, top_k: int, same: bool
) -> None:
    """Tiles divide neither rows nor columns. If `same`, all tokens have the same experts.

    A bias then lowers the logits of the other experts. A bias that raised the logits of the chosen
    experts above 16 would make the comparison inexact: there, neighbouring bfloat16 numbers differ
    by 1/8, and another order of the router's sums could change the routing weights by 3 %.
    """
    weights, router = layer(experts, width, inner), router_of(experts, width, top_k)
    assert router.bias is not None
    if same:
        router.bias[top_k:] -= 20
    whole = normal(tokens, width + 64, dtype=DTYPE)
    x = whole[:, :width]
    exact = expected(x, router, weights)
    semaphores = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)

    def forward() -> Tensor:
        with poisoned():
            out: Tensor = mxfp4_few.experts_of_few(x, router, weights, semaphores)
        return out

    first = forward()
    assert error(first, exact) < LIMIT
    assert torch.equal(first, forward())
    assert not semaphores.any()


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4, 8, 300])
def test_layers_in_a_graph_equal_single_layers(tokens: int) -> None:
    """In a graph, the kernels of neighbouring layers overlap. Each layer reads the one before."""
    layers = [(router_of(8, 2880, 4), layer(8, 2880, 2880)) for _ in range(3)]
    backend = TritonMoe(torch.device(DEVICE))
    x = normal(tokens, 2880, dtype=DTYPE)

    def forward(wait: bool) -> list[Tensor]:
        outs = [x]
        for _ in range(4):
            for parts in layers:
                outs.append(backend.forward(outs[-1], *parts))
                if wait:
                    torch.cuda.synchronize()
        return outs

    single = forward(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(wait=False)
    for _ in range(20):
        for out in captured[1:]:
            out.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, single, captured))


def test_words_are_decoded_exactly() -> None:
    """All codes, with the scales from 2^-94 to 2^33. FAST gives 2^-32 times the weights."""
    codes = recode(torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16))
    scales = torch.arange(33, 161, dtype=torch.uint8, device=DEVICE).view(128, 1)
    found = torch.full((128, 16, 32), torch.nan, dtype=DTYPE, device=DEVICE)
    rows = scales.expand(128, 16).contiguous()
    _decode_words[(128,)](codes.view(torch.int32), rows, found, FAST=not INTERPRETED)
    stored = codes.repeat(128, 1, 1).unsqueeze(1), rows.view(128, 1, 16, 1)
    exact = dequantise(*stored, 32, torch.float64)
    assert torch.equal(found.double(), exact if INTERPRETED else exact * 2.0**-32)


def test_words_of_every_scale_are_decoded_exactly_in_float32() -> None:
    codes = recode(torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16))
    # With larger scales, the numbers overflow float32.
    scales = torch.arange(252, dtype=torch.uint8, device=DEVICE).view(252, 1)
    found = torch.full((252, 16, 32), torch.nan, device=DEVICE)
    rows = scales.expand(252, 16).contiguous()
    _decode_words[(252,)](codes.view(torch.int32), rows, found, FAST=False)
    stored = codes.repeat(252, 1, 1).unsqueeze(1), rows.view(252, 1, 16, 1)
    exact = dequantise(*stored, 32, torch.float64)
    assert torch.equal(found.double(), exact)


def test_the_reference_of_experts_is_the_torch_backend() -> None:
    gate_up, down, swiglu = layer(4, 64, 96)
    gate_up, down = gate_up._replace(bias=normal(4, 192)), down._replace(bias=normal(4, 64))
    weights, router = ExpertWeights(gate_up, down, swiglu), router_of(4, 64)
    router = router._replace(weight=router.weight.float(), bias=normal(4))
    x = normal(7, 64)
    own = TorchMoe(torch.device(DEVICE)).forward(x, router, weights)
    assert error(own, expected(x, router, weights)) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_float32_model_equals_its_dequantised_weights(tmp_path: Path) -> None:
    """In float32, the weights of both models are equal, and only the order of the sums differs."""
    tokens = [
        Driver(make_engine(path, device="cuda", page_size=16)).generate(0, prompt_of(200), 16)
        for path in build(tmp_path, 288)
    ]
    assert tokens[0] == tokens[1]


# For MXFP4, the chunks of 120 and of 12 tokens run the kernel of packed_blocks.py with two tilings.
# The smaller chunks run the kernels of mxfp4_few.py.
CHUNKS = [120, *[12] * 4, *[4] * 4, *[2] * 4, *[1] * 16]
TOKENS = [120, 48, 40]
# Limits of the divergence from float32. torch's bfloat16 products on a CPU have a mean of 0.02 and
# a median of 0.001. The divergence from another position of the prompt is 2.2. A token that gets
# another expert can have a divergence of 1.
MOST_MEAN, MOST_MEDIAN = 0.2, 0.01


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_bfloat16_model_is_as_exact_as_its_dequantised_weights(tmp_path: Path) -> None:
    """Both models differ from float32 by rounding alone. Each has kernels of its own."""
    packed, reference = build(tmp_path, 288)
    ids = prompt_of(sum(CHUNKS))
    exact = logprobs_of_chunks(reference, ids, CHUNKS)
    for path in (packed, reference):
        found = divergences(exact, logprobs_of_chunks(path, ids, CHUNKS, dtype="bfloat16"))
        for part in torch.split(found, TOKENS):
            assert 0 < part.median() < MOST_MEDIAN
            assert 0 < part.mean() < MOST_MEAN
