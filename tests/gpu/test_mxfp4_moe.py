"""The experts of gpt-oss in MXFP4 and in x's dtype, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.kernel.mxfp4_weights import dequantise
from minisgl.moe.base import Biases, ClampedSwiglu, ExpertWeights, route
from minisgl.moe.torch_backend import TorchMoe
from minisgl.moe.triton_backend import TritonMoe
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.parity.driver import Driver, make_engine
from tests.parity.test_engine_parity import prompt_of
from tests.parity.test_mxfp4_parity import build

triton = pytest.importorskip("triton", reason="needs Triton")
tl = pytest.importorskip("triton.language", reason="needs Triton")
stacked_moe = pytest.importorskip("minisgl.kernel.triton.stacked_moe", reason="needs Triton")

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 1.5e-2
SWIGLU = ClampedSwiglu(1.702, 7.0)
TOP_K = 2


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes, scales, out, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, 16)[:, None]
    pair = tl.load(codes + row * 16 + tl.arange(0, 16)[None, :])
    power = tl.load(scales + tl.program_id(0) * 16 + row)
    wide = stacked_moe.decode(pair, power, out.dtype.element_ty, FAST)
    at = (tl.program_id(0) * 16 + row) * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, wide)


def codes_and_scales(*shape: int) -> tuple[Tensor, Tensor]:
    """Every code and random powers of two, with weights of the order of K ** -0.5."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), device=DEVICE, dtype=torch.uint8)
    middle = 127 - 2 - round(torch.log2(torch.tensor(float(shape[-1]))).item() / 2)
    scales = torch.randint(
        middle - 2, middle + 2, (*shape[:-1], shape[-1] // 32), device=DEVICE, dtype=torch.uint8
    )
    return codes, scales


def layer(experts: int, width: int, inner: int) -> ExpertWeights:
    gate_up, gate_up_scales = codes_and_scales(experts, 2 * inner, width)
    down, down_scales = codes_and_scales(experts, width, inner)
    biases = Biases(
        4 * normal(experts, 2 * inner, dtype=DTYPE), normal(experts, width, dtype=DTYPE)
    )
    return ExpertWeights(
        normal(experts, width, dtype=DTYPE) * width**-0.5,
        gate_up,
        down,
        biases=biases,
        router_bias=normal(experts, dtype=DTYPE),
        swiglu=SWIGLU,
        mxfp4_scales=(gate_up_scales, down_scales),
    )


def dequantised(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    assert weights.mxfp4_scales is not None
    scales = weights.mxfp4_scales
    return weights._replace(
        gate_up=dequantise(weights.gate_up, scales[0], dtype),
        down=dequantise(weights.down, scales[1], dtype),
        mxfp4_scales=None,
    )


def expected(x: Tensor, weights: ExpertWeights) -> Tensor:
    """The experts one after the other in float64; the routing is that of x's dtype."""
    assert weights.biases is not None
    logits = torch.nn.functional.linear(x, weights.router, weights.router_bias)
    factors, experts = route(logits, TOP_K, True)
    wide = dequantised(weights, torch.float64)
    gate_up_bias, down_bias = (bias.double() for bias in weights.biases)
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for factor, expert in zip(factors[token], experts[token].tolist(), strict=True):
            rows = wide.gate_up[expert] @ x[token].double() + gate_up_bias[expert]
            gate, up = rows.chunk(2)
            gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
            hidden = (up + 1) * gate * torch.sigmoid(SWIGLU.alpha * gate)
            out[token] += factor.double() * (wide.down[expert] @ hidden + down_bias[expert])
    return out


SHAPES = [(1, 4, 96, 32), (3, 8, 160, 64), (40, 4, 64, 96)]
if not INTERPRETED:
    SHAPES += [(1, 32, 2880, 2880), (64, 32, 2880, 1440), (600, 8, 1440, 736), (4000, 4, 512, 512)]


@pytest.mark.parametrize(("tokens", "experts", "width", "inner"), SHAPES)
@pytest.mark.parametrize("packed", [True, False])
def test_experts(tokens: int, experts: int, width: int, inner: int, packed: bool) -> None:
    """Tiles divide neither the sizes nor the blocks of tokens."""
    weights = layer(experts, width, inner)
    x = normal(tokens, width, dtype=DTYPE)
    exact = expected(x, weights)
    given = weights if packed else dequantised(weights, DTYPE)
    backend = TritonMoe(torch.device(DEVICE))
    first = backend.forward(x, given, TOP_K, True)
    assert error(first, exact) < LIMIT
    assert torch.equal(first, backend.forward(x, given, TOP_K, True))


def test_every_code_and_scale_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    # Larger scales overflow bfloat16 with the code 6.
    scales = torch.arange(240, dtype=torch.uint8, device=DEVICE).view(240, 1).expand(240, 16)
    found = torch.full((240, 16, 32), torch.nan, dtype=DTYPE, device=DEVICE)
    _decode[(240,)](codes, scales.contiguous(), found, FAST=not INTERPRETED)
    wide = codes.expand(240, 16, 16)
    assert torch.equal(found, dequantise(wide, scales.contiguous().unsqueeze(-1), DTYPE))


def test_the_reference_of_experts_is_the_torch_backend() -> None:
    weights = layer(4, 64, 96)
    weights = weights._replace(
        router=weights.router.float(),
        biases=Biases(*(bias.float() for bias in weights.biases or ())),
        router_bias=normal(4),
    )
    x = normal(7, 64)
    own = TorchMoe(torch.device(DEVICE)).forward(x, weights, TOP_K, renormalise=True)
    assert error(own, expected(x, weights)) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_equals_its_dequantised_weights(dtype: str, tmp_path: Path) -> None:
    """Both dtypes hold the dequantised weights exactly, so that both models compute the same."""
    tokens = [
        Driver(make_engine(path, device="cuda", dtype=dtype, page_size=16)).generate(
            0, prompt_of(200), 16
        )
        for path in build(tmp_path, 96)
    ]
    assert tokens[0] == tokens[1]
