"""FlashInfer's prefill with windows, soft caps and sinks, against the torch backend in float32.

FlashInfer compiles each module once; `-k d64` runs the cases of one head size.
"""

import pytest
import torch

from minisgl.attention.base import AttentionNeeds, InTurn
from minisgl.attention.flashinfer import ContiguousAttention
from minisgl.attention.registry import attention_kernels, create_attention_backend
from minisgl.build.flashinfer_jit import compile_missing
from tests.gpu.scenes import CASES, CUDA, KV_HEADS, Scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
NAMES = list(CASES)
CASE = pytest.mark.parametrize("case", CASES)
DECODE = pytest.mark.parametrize("name", ["flashinfer", "flashinfer,torch"])


@pytest.fixture(scope="module", autouse=True)
def modules(request: pytest.FixtureRequest) -> None:
    """Compile the modules of the selected cases, all at the same time."""
    capability = torch.cuda.get_device_capability()
    cases = (getattr(item, "callspec", None) for item in request.session.items)
    chosen = {
        case for each in cases if each is not None for case in each.params.values() if case in NAMES
    }
    kernels = set()
    for dim, _, rule in (CASES[case] for case in chosen):
        needs = AttentionNeeds(CUDA, torch.bfloat16, dim, 16, frozenset({rule}))
        kernels |= set(
            attention_kernels("flashinfer", [needs], [10 * capability[0] + capability[1]])
        )
    compile_missing(sorted(kernels, key=str))()


SHAPES = {
    "few": [(0, 40), (700, 1), (1031, 1), (15, 60), (2900, 16)],
    "many": [(0, 200), (33, 1), (300, 130), (1300, 700), (16, 1)],
    "whole": [(0, 5200), (0, 129)],
    "prefixes": [(1500, 4000), (3000, 1), (5000, 2500)],
    "long": [(12_000, 300), (9000, 8000)],
}


@CASE
@FP8
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(case: str, fp8: bool, page_size: int, shape: str) -> None:
    """On Hopper, the first step copies its contexts if a copy may pay and fits."""
    reqs = SHAPES[shape]
    scene = Scene(case, page_size, reqs, fp8)
    scene.store_all(reqs)
    ours, reference = scene.backends("flashinfer,torch")
    step, tokens = scene.step(0, reqs), sum(length for _, length in reqs)
    first = ours.prepare(step)
    assert isinstance(first, InTurn) == fp8
    window, group = scene.rule.window, scene.q_heads // KV_HEADS
    if not fp8 and shape != "long":
        pays = window is None or window * group >= 1700
        copied = torch.cuda.get_device_capability()[0] == 9 and pays
        assert isinstance(first, ContiguousAttention) == copied
    scene.check((first, reference.prepare(step)), tokens)
    for _ in range(2):
        scene.check((ours.prepare(step), reference.prepare(step)), tokens)


@CASE
@FP8
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_of_one_prompt(case: str, fp8: bool, page_size: int) -> None:
    """Before each chunk, the pages behind its window are freed."""
    chunks = [512, 3, 64, 1, 129, 2048, 700, 128, 5]
    scene = Scene(case, page_size, [(0, sum(chunks))], fp8)
    backends, done = scene.backends("flashinfer,torch"), 0
    for chunk in chunks:
        scene.store(scene.rows[0], done, done + chunk)
        scene.drop(scene.rows[0], done)
        step = scene.step(0, [(done, chunk)])
        scene.check([backend.prepare(step) for backend in backends], chunk)
        done += chunk


@CASE
@FP8
@DECODE
def test_mixed_steps(case: str, fp8: bool, name: str) -> None:
    reqs = [(0, 1), (700, 1), (4500, 1), (0, 300), (2000, 70), (17, 1)]
    scene = Scene(case, 16, reqs, fp8)
    scene.store_all(reqs)
    backends, step = scene.backends(name), scene.step(3, reqs)
    for _ in range(2):
        scene.check([backend.prepare(step) for backend in backends], 374)


@FP8
@DECODE
@pytest.mark.parametrize(
    ("case", "full"), [("d64-window-sinks", "d64-sinks"), ("d256-window-cap", "d256-cap")]
)
def test_layers_of_two_kinds(case: str, full: str, fp8: bool, name: str) -> None:
    """Window layers have a pool and a page table of their own, as in a model."""
    reqs = [(300, 1), (0, 400), (1500, 700)]
    wide, narrow = Scene(full, 16, reqs, fp8), Scene(case, 16, reqs, fp8, layer=1)
    assert wide.rows == narrow.rows
    for scene in (wide, narrow):
        scene.store_all(reqs)
    step = wide.step(1, reqs)._replace(window_table=narrow.table)
    attentions = [
        create_attention_backend(
            each, pool, wide.q_heads, [wide.rule, narrow.rule], windows=windows
        ).prepare(step)
        for each, pool, windows in zip((name, "torch"), wide.pools, narrow.pools, strict=True)
    ]
    for scene in (narrow, wide, narrow):
        scene.check(attentions, 1101)
