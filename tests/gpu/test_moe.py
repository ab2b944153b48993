"""The Triton experts against float64, on fresh random input and in memory full of NaN.

With TRITON_INTERPRET=1 the kernel tests run on CPU, slowly, in Triton's interpreter.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from minisgl.moe.base import ExpertMatrix, ExpertWeights, Router
from minisgl.moe.base import route as reference_route
from tests.gpu import test_schedules as schedules
from tests.parity.driver import Driver, make_engine
from tests.parity.models import VOCAB_SIZE, build_model, transformers_greedy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
# In matrix products, the interpreter takes the bits of bfloat16 for integers.
MATRIX_DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block torch fills new memory with NaN, so that reads of unwritten memory show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def layer(experts: int, width: int, inner: int, dtype: torch.dtype) -> ExpertWeights:
    """Random weights, scaled so that outputs are of the order of 1."""
    return ExpertWeights(
        ExpertMatrix(normal(experts, 2 * inner, width, dtype=dtype) * width**-0.5),
        ExpertMatrix(normal(experts, width, inner, dtype=dtype) * inner**-0.5),
    )


def router_of(
    experts: int,
    width: int,
    dtype: torch.dtype,
    top_k: int,
    renormalise: bool = True,
    shared: int = 0,
) -> Router:
    """A random router, scaled so that logits are of the order of 1. experts: with shared ones."""
    rows = experts - shared + (8 if shared else 0)
    weight = normal(rows, width, dtype=dtype) * width**-0.5
    return Router(weight, None, top_k, renormalise, shared)


def expected(x: Tensor, weights: ExpertWeights, scales: Tensor, experts: Tensor) -> Tensor:
    """The definition in float64, for a given routing."""
    x, out = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for expert in experts.unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ weights.gate_up.values[expert].double().T).chunk(2, dim=-1)
        share = (silu(gate) * up) @ weights.down.values[expert].double().T
        out.index_add_(0, tokens, share * scales[tokens, places].double().unsqueeze(-1))
    return out


def error(out: Tensor, correct: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where the output holds one."""
    return ((out.double() - correct).norm() / correct.norm()).item()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (9, 6, 2), (70, 60, 3)])
def test_route(tokens: int, experts: int, top_k: int, shared: int, renormalise: bool) -> None:
    from minisgl.kernel.triton.moe_choice import route

    logits = normal(tokens, experts + (shared > 0)) * 3
    router = Router(logits, None, top_k, renormalise, shared)
    with poisoned():
        scales, chosen = route(logits, router)
    correct_scales, correct = reference_route(logits, router)
    assert torch.equal(chosen.long(), correct)
    torch.testing.assert_close(scales, correct_scales, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_route_by_sigmoids(shared: int, renormalise: bool) -> None:
    """The correction changes the choice and not the weights. It is larger than all scores."""
    from minisgl.kernel.triton.moe_choice import route

    logits, correction = normal(70, 60), 8 + normal(60)
    router = Router(logits, None, 8, renormalise, shared, False, correction, 2.5)
    with poisoned():
        scales, chosen = route(logits, router)
    correct_scales, correct = reference_route(logits, router)
    assert torch.equal(chosen.long(), correct)
    torch.testing.assert_close(scales, correct_scales, atol=1e-6, rtol=1e-5)


def test_route_of_bfloat16() -> None:
    """The same choice and weights as for the same numbers in float32, of which many are equal."""
    from minisgl.kernel.triton.moe_choice import route

    logits = (normal(40, 61) * 8).round().bfloat16() / 4
    logits[1, 7], logits[2], logits[3, 4:9], logits[4] = torch.nan, -1.0, torch.inf, torch.nan
    router = Router(logits, None, 8, True, 1)
    with poisoned():
        scales, chosen = route(logits, router)
    correct_scales, correct = route(logits.float(), router)
    assert torch.equal(chosen, correct)
    assert torch.equal(scales.nan_to_num(-1.0), correct_scales.nan_to_num(-1.0))


def test_route_of_ties_and_nan() -> None:
    """Ids stay distinct and in range, and a row with NaN does not change the other rows."""
    from minisgl.kernel.triton.moe_choice import route

    good = normal(1, 60)
    bad = torch.full((1, 60), torch.nan, device=DEVICE)
    logits = torch.cat((good, bad, -bad, torch.zeros_like(good), good.fill_(-torch.inf), good))
    logits[0], logits[5] = normal(60), normal(60)
    logits[5, 7], logits[5, 9] = torch.inf, -torch.nan
    router = Router(logits, None, 8, True)
    scales, chosen = route(logits, router)
    assert chosen.min() >= 0
    assert chosen.max() < 60
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    assert chosen[3].tolist() == list(range(8))
    assert chosen[5, 0] == 7
    torch.testing.assert_close(scales[3], torch.full((8,), 0.125, device=DEVICE))
    torch.testing.assert_close(scales[0], reference_route(logits[:1], router)[0][0])


def assignments(tokens: int, experts: int, top_k: int, kind: str, shared: int = 0) -> Tensor:
    """int32 [T, top_k + shared], distinct in a row. kind: random, one (all the same), or skewed."""
    scores = torch.rand(tokens, experts, device=DEVICE)
    if kind == "one":
        scores[:, 1 : 1 + top_k] += 2
    elif kind == "skewed":
        scores[:, experts // 2 :] -= 1
        scores[:, 0] += 2
    others = torch.arange(experts, experts + shared, device=DEVICE).expand(tokens, -1)
    return torch.cat((scores.topk(top_k).indices, others), dim=1).int()


@pytest.mark.parametrize("kind", ["random", "one", "skewed"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block", "shared"),
    [
        (1, 128, 8, 16, 1),
        (5, 6, 2, 16, 0),
        (33, 6, 2, 16, 3),
        (600, 60, 8, 32, 1),
        (1100, 20, 4, 128, 0),
    ],
)
def test_blocks_hold_every_assignment_once(
    tokens: int, experts: int, top_k: int, block: int, shared: int, kind: str
) -> None:
    """Shared experts come first, then the others in the order of their numbers."""
    from minisgl.kernel.triton.moe_routing import align

    chosen = assignments(tokens, experts, top_k, kind, shared)
    with poisoned():
        slots, owners, _ = align(chosen, experts, block, shared)
    owned = [owner for owner in owners.tolist() if owner >= 0]
    total = experts + shared
    assert owned == sorted(owned, key=lambda owner: (owner - experts) % total)
    assert owners[len(owned) :].eq(-1).all()
    flat, found = chosen.flatten(), []
    for owner, row in zip(owned, slots.view(-1, block).tolist(), strict=False):
        live = [at for at in row if at < flat.numel()]
        assert live
        assert row == live + [flat.numel()] * (block - len(live))
        assert flat[live].eq(owner).all()
        found += live
    assert len(owned) == sum(-(-count // block) for count in flat.bincount().tolist())
    order = ((flat - experts) % total).argsort(stable=True)
    assert found == order.tolist()


@pytest.mark.parametrize("kind", ["random", "one", "skewed"])
@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(
    ("tokens", "experts", "width", "inner", "top_k"),
    [(1, 128, 64, 96, 8), (4, 16, 128, 48, 4), (50, 8, 96, 20, 3)],
)
def test_experts_of_many(
    shared: int,
    tokens: int,
    experts: int,
    width: int,
    inner: int,
    top_k: int,
    dtype: torch.dtype,
    kind: str,
) -> None:
    from minisgl.kernel.triton.moe_grouped import experts_of_many

    x = normal(tokens, 2 * width, dtype=dtype)[:, width:]
    weights = layer(experts + shared, width, inner, dtype)
    chosen = assignments(tokens, experts, top_k, kind, shared)
    scales = torch.rand(chosen.shape, device=DEVICE)
    with poisoned():
        outs = [experts_of_many(x, weights, scales, chosen, shared) for _ in range(2)]
    assert error(outs[0], expected(x, weights, scales, chosen)) < TOLERANCE[dtype]
    assert torch.equal(*outs)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(("width", "inner"), [(256, 192), (320, 128), (160, 96)])
def test_every_tiling(number: int, width: int, inner: int) -> None:
    from minisgl.kernel.triton import moe_grouped

    dtype = MATRIX_DTYPES[-1]
    _, tiling = moe_grouped._TILINGS[number]
    tokens, experts, top_k = tiling.tokens * 2 + 5, 7, 3
    x, weights = normal(tokens, width, dtype=dtype), layer(experts, width, inner, dtype)
    chosen = assignments(tokens, experts, top_k, "skewed")
    scales = torch.rand(tokens, top_k, device=DEVICE)
    with poisoned():
        out = moe_grouped.experts_of_many(x, weights, scales, chosen, tiling=tiling)
    assert error(out, expected(x, weights, scales, chosen)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize(
    ("tokens", "experts", "width", "inner", "top_k"),
    [(1, 128, 64, 96, 8), (4, 6, 2100, 20, 3), (3, 16, 128, 300, 4)],
)
def test_experts_of_few(
    shared: int,
    tokens: int,
    experts: int,
    width: int,
    inner: int,
    top_k: int,
    renormalise: bool,
    dtype: torch.dtype,
) -> None:
    """Two calls with the same semaphores agree, and each call leaves zeros in them."""
    from minisgl.kernel.triton.moe_choice import route
    from minisgl.kernel.triton.moe_few import experts_of_few

    x = normal(tokens, 2 * width, dtype=dtype)[:, width:]
    weights = layer(experts + shared, width, inner, dtype)
    router = router_of(experts + shared, width, dtype, top_k, renormalise, shared)
    semaphores = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with poisoned():
        outs = [experts_of_few(x, router, weights, semaphores) for _ in range(2)]
    rows = experts + (shared > 0)
    logits = (x.double() @ router.weight[:rows].double().T).to(dtype)
    routing = route(logits, router)
    assert error(outs[0], expected(x, weights, *routing)) < 2 * TOLERANCE[dtype]
    assert torch.equal(*outs)
    assert not semaphores.any()


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(3, torch.bfloat16), (40, MATRIX_DTYPES[-1])],  # matrix products compute many tokens
    ids=["few", "many"],
)
def test_backend_routes_by_sigmoids(tokens: int, dtype: torch.dtype) -> None:
    """Few and many tokens get the experts of logits that are not rounded to 16 bits."""
    from minisgl.moe.triton_backend import TritonMoe

    x, weights = normal(tokens, 128, dtype=dtype), layer(17, 128, 48, dtype)
    router = router_of(17, 128, dtype, 4, shared=1)
    router = router._replace(shared_gate=False, correction=8 + normal(16), scale=2.5)
    out = TritonMoe(torch.device(DEVICE)).forward(x, router, weights)
    logits = x.double() @ router.weight[:16].double().T
    routing = reference_route(logits.float(), router)
    assert error(out, expected(x, weights, *routing)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 4, 5, 33])
@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
def test_backend_and_padded_rows(dtype: torch.dtype, tokens: int) -> None:
    """The values of padding rows change no bit in the results of the real rows."""
    from minisgl.kernel.triton.moe_choice import route
    from minisgl.moe.triton_backend import TritonMoe

    weights, router = layer(16, 128, 48, dtype), router_of(16, 128, dtype, 4, shared=1)
    x = normal(tokens + 3, 128, dtype=dtype)
    routing = route(router.logits(x, 16)[:tokens], router)
    backend = TritonMoe(torch.device(DEVICE))
    call = captured(lambda: backend.forward(x, router, weights))
    outs = []
    for padding in (0.0, torch.nan, 3e38 if dtype is torch.float32 else 3e4):
        x[tokens:] = padding
        outs.append(call()[:tokens].clone())
    assert error(outs[0], expected(x[:tokens], weights, *routing)) < 2 * TOLERANCE[dtype]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture `run` in a CUDA graph, in poisoned memory, and return its replay.

    In the interpreter, return `run` itself.
    """
    with poisoned():
        out = run()
        if INTERPRETED:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_no_host_sync() -> None:
    from minisgl.moe.triton_backend import TritonMoe

    weights = layer(16, 128, 48, torch.bfloat16)
    router = router_of(16, 128, torch.bfloat16, 4)
    backend = TritonMoe(torch.device(DEVICE))
    for tokens in (2, 40):
        x = normal(tokens, 128, dtype=torch.bfloat16)
        backend.forward(x, router, weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.forward(x, router, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-mixed"])
def test_engine_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    path = build_model(family, tmp_path)
    engine = make_engine(path, device="cuda", dtype="float32", num_pages=200)
    prompt = torch.randint(0, VOCAB_SIZE, (301,), generator=torch.Generator().manual_seed(1))
    expected = transformers_greedy(path, prompt.tolist(), 6)
    for chunk in (0, 3, 100):
        assert Driver(engine).generate(0, prompt.tolist(), 6, chunk) == expected


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("case", schedules.CASES[:4], ids=str)
def test_whole_schedules_in_bfloat16(case: schedules.Case, tmp_path: Path) -> None:
    """Almost all tokens are the best ones within rounding, with graphs and without.

    A few may be worse: where two experts nearly tie, bfloat16 can choose another expert than
    float32, which changes the logits by more than rounding.
    """
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, **experts}
    (tmp_path / "config.json").write_text(json.dumps(schedules.CONFIG | changes))
    oracle = schedules.exact_cpu_engine(str(tmp_path))
    engine = schedules.gpu_engine(str(tmp_path), oracle, case, schedules.BF16)
    assert bool(engine._launcher.graphs.decode) == case.graphs
    found = schedules.run(engine, case, schedules.greedy)
    schedules.prove(case, found)
    count = len(schedules.prompts())
    short = [
        schedules.shortfall(oracle, schedules.prompts()[uid % count], output)
        for uid, output in found.outputs.items()
    ]
    assert (torch.cat(short) < schedules.ROUNDING).float().mean() > 0.95
