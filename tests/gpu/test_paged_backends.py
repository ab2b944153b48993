"""The backends trtllm and flash-attention against the torch backend in float32.

Keys and values are random. Outputs, unused pages, pages behind a window and the slots after the end
of a context are NaN before a call. A case that a backend refuses is skipped with its reason.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionNeeds, DecodeGraphAttention
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.trtllm import TrtllmAttention
from tests.gpu.scenes import CASES, CUDA, PLAIN_CASES, ROWS, Scene, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = {backend.name: backend for backend in (TrtllmAttention, FlashAttention)}
BACKEND = pytest.mark.parametrize("name", BACKENDS)
# XQA has a module for each size of a page, so few cases have all sizes.
EVERY_SIZE = ("d128-4", "d64-window-sinks")
CASE = pytest.mark.parametrize(
    ("case", "page_size"),
    [(case, 16) for case in CASES | PLAIN_CASES]
    + [(case, page_size) for page_size in (32, 64) for case in EVERY_SIZE],
)
PROMPTS = [(0, 200), (33, 1), (300, 130), (1300, 700), (16, 1), (15, 60)]
DECODING = [(0, 1), (700, 1), (4500, 1), (15, 1), (63, 1), (64, 1), (17, 1), (9000, 1)]


def make_scene(name: str, case: str, page_size: int, reqs: list[tuple[int, int]]) -> Scene:
    """The scene of a case, with its keys stored. Skips a case that the backend refuses."""
    dim, _, rule = (CASES | PLAIN_CASES)[case]
    needs = AttentionNeeds(CUDA, torch.bfloat16, dim, page_size, frozenset({rule}))
    reason = BACKENDS[name].obstacle(needs)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    scene = Scene(case, page_size, reqs, fp8=False)
    scene.store_all(reqs)
    return scene


@BACKEND
@CASE
def test_decode(name: str, case: str, page_size: int) -> None:
    scene = make_scene(name, case, page_size, DECODING)
    backends = scene.backends(f"torch,{name}")
    for count in (len(DECODING), 1):
        step = scene.step(len(DECODING), DECODING).part(0, count)
        scene.check([backend.prepare(step) for backend in backends], count)


@BACKEND
@pytest.mark.parametrize("case", ["d128-4", "d64-window-sinks", "d256-window"])
@pytest.mark.parametrize("tokens", [2, 3, 4, 8])
def test_decode_with_drafts(name: str, case: str, tokens: int) -> None:
    reqs = [(start, tokens) for start, _ in DECODING]
    scene = make_scene(name, case, 16, reqs)
    step = scene.step(len(reqs), reqs)
    backends = scene.backends(f"torch,{name}")
    scene.check([backend.prepare(step) for backend in backends], tokens * len(reqs))


@BACKEND
@CASE
def test_prompts(name: str, case: str, page_size: int) -> None:
    """On Hopper, trtllm runs prompts as the backend flashinfer does."""
    if name == "trtllm" and torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("flashinfer computes prompts here")
    scene = make_scene(name, case, page_size, PROMPTS)
    step, tokens = scene.step(0, PROMPTS), sum(length for _, length in PROMPTS)
    backends = scene.backends(f"{name},torch")
    for _ in range(2):
        scene.check([backend.prepare(step) for backend in backends], tokens)


def test_many_short_prompts() -> None:
    """flash-attention divides a step of more prompts than one compiled kernel takes."""
    scene = make_scene("flash-attention", "d128-2", 16, [(5, 3), (0, 9)])
    count = 300
    parts = [scene.step(0, [(5, 3), (0, 9)]).part(nth % 2, nth % 2 + 1) for nth in range(count)]
    step = parts[0]._replace(
        start=np.concatenate([part.start for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        device_rows=torch.cat([part.device_rows for part in parts]),
        device_start=torch.cat([part.device_start for part in parts]),
        device_lengths=torch.cat([part.device_lengths for part in parts]),
    )
    backends = scene.backends("flash-attention,torch")
    scene.check([backend.prepare(step) for backend in backends], 6 * count)


def captured(
    attention: DecodeGraphAttention, scene: Scene, reqs: int
) -> tuple[Tensor, Tensor, torch.cuda.CUDAGraph]:
    """The queries, the output and the graph of a decode step."""
    shape = (reqs, scene.q_heads, scene.pools[0].spec.head_dim)
    q = torch.randn(shape, device=CUDA).bfloat16()
    out = torch.full_like(q, torch.nan)

    def run() -> None:
        attention.compute_metadata()
        attention.forward(0, q, out, scene.sinks)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return q, out, graph


@BACKEND
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("case", EVERY_SIZE)
def test_captured_decode_follows_its_inputs(name: str, case: str, page_size: int) -> None:
    """A graph that is captured for padding gives correct results for contexts of other lengths."""
    scene = make_scene(name, case, page_size, DECODING)
    ours, reference = scene.backends(f"torch,{name}")
    step = scene.step(len(DECODING), DECODING)
    rows, start = step.device_rows.clone(), step.device_start.clone()
    scene.table[ROWS] = scene.pools[0].dummy_page
    step.device_rows.fill_(ROWS)
    step.device_start.zero_()
    attention = ours.decode_graph(len(DECODING), step)
    assert attention is not None
    q, out, graph = captured(attention, scene, len(DECODING))
    for real in (len(DECODING), 3):
        step.device_rows[:real].copy_(rows[:real])
        step.device_rows[real:] = ROWS
        step.device_start[:real].copy_(start[:real])
        step.device_start[real:] = 0
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected = torch.full_like(q[:real], torch.nan, dtype=torch.float32)
        sinks = None if scene.sinks is None else scene.sinks.float()
        of_real = scene.step(len(DECODING), DECODING).part(0, real)
        reference.prepare(of_real).forward(0, q[:real].float(), expected, sinks)
        close(out[:real].float(), expected)
