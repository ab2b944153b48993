"""The kernels of gated delta nets against their reference, over steps that mix all requests.

Memory is poisoned first. With TRITON_INTERPRET=1 the same tests run on a CPU, slowly.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel.delta import (
    TAPS,
    DeltaMemory,
    DeltaWeights,
    GatedNorm,
    gated_delta,
    gated_norm,
)
from minisgl.kernel.states import StateStep, begin_states

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
ROWS = 6


class Layer:
    """One layer's weights and memory, and the boundaries of its rows."""

    def __init__(
        self,
        key_heads: int,
        heads: int,
        dim: int,
        drafts: bool,
        dtype: torch.dtype,
        rows: int = ROWS,
    ) -> None:
        self.heads, self.width = heads, 2 * key_heads * dim + heads * dim
        size, self.dtype = 16, dtype
        parts = DeltaMemory(
            torch.empty(rows, heads, dim, dim),
            torch.empty(rows, TAPS - 1, self.width, dtype=dtype),
            torch.empty(rows, 2 * size, key_heads, dim, dtype=dtype),
            torch.empty(rows, (2 if drafts else 1) * size, heads, dim),
            torch.empty(rows, 2 * size, heads),
            torch.empty(rows, 16 if drafts else 4, self.width, dtype=dtype),
        )
        self.memory = DeltaMemory(*(part.fill_(torch.nan) for part in parts))
        conv = (torch.randn(self.width, TAPS) / 2).to(dtype)
        self.weights = DeltaWeights(conv, torch.rand(heads).log(), torch.randn(heads))
        self.boundaries = torch.zeros(rows, dtype=torch.int32)

    def step(self, requests: list[tuple[int, int, int]], num_decode: int) -> StateStep:
        """requests: row, start and length of each."""
        rows, start, lengths = torch.tensor(requests, dtype=torch.int32).unbind(1)
        first = (lengths.cumsum(0) - lengths).int()
        out, count = rows.new_empty(6, len(rows)), int(lengths.sum())
        columns = rows, start, lengths, first
        begin_states(self.boundaries, *columns, num_decode, 16, count, count, out)
        return StateStep.of(out, chunks=len(rows) - num_decode)

    def inputs(self, step: StateStep) -> tuple[tuple[Tensor, Tensor, Tensor], GatedNorm]:
        """The inputs of a step, with the gate beside the others, as a projection returns both."""
        tokens, outputs = int(step.lengths.sum()), self.heads * self.memory.deltas.shape[3]
        mixed, gate = (
            torch.randn(tokens, self.width + outputs)
            .to(self.dtype)
            .split((self.width, outputs), dim=1)
        )
        a, b = torch.randn(2, tokens, self.heads).to(self.dtype)
        weight = torch.rand(self.memory.deltas.shape[3]).to(self.dtype)
        return (mixed, a, b), GatedNorm(weight, gate, 1e-2)


def on_device(value: DeltaMemory | StateStep | DeltaWeights | GatedNorm):  # type: ignore[no-untyped-def]
    return type(value)(*(x.to(DEVICE, copy=True) if isinstance(x, Tensor) else x for x in value))


def error(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double().cpu(), expected.double()
    return float((out - expected).norm() / expected.norm())


def check_step(layer: Layer, ours: DeltaMemory, step: StateStep, limit: float) -> None:
    """Run a step in the kernels, in `ours`, and in the reference. Outputs and states agree."""
    from minisgl.kernel.triton import delta as kernels

    inputs, norm = layer.inputs(step)
    expected = gated_delta(*inputs, layer.weights, layer.memory, step, norm)
    device = (x.to(DEVICE) for x in inputs)
    weights = on_device(layer.weights)
    out = kernels.gated_delta(*device, weights, ours, on_device(step), on_device(norm))
    assert error(out, expected) < limit, step
    for row in step.rows[step.target > 0].tolist():
        assert error(ours.state[row], layer.memory.state[row]) < limit, (row, step)
        assert error(ours.tails[row], layer.memory.tails[row]) == 0, (row, step)


SCHEDULE = [  # (row, start, length) of each request, and the number of decode requests
    ([(0, 0, 150), (1, 0, 9), (2, 0, 16)], 0),
    ([(1, 9, 1), (2, 16, 1), (0, 150, 27), (3, 0, 33)], 2),  # 150 and 177 are inside a page
    ([(2, 17, 1), (1, 10, 1), (3, 33, 15), (0, 177, 53)], 2),
    ([(1, 11, 1), (0, 230, 1), (4, 0, 1), (3, 48, 64)], 2),  # 230 is inside a page, 48 is not
    *(([(0, 231 + i, 1), (1, 12 + i, 1), (3, 112 + i, 1)], 3) for i in range(18)),
]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("key_heads", "heads", "dim"), [(2, 4, 128), (1, 3, 64)] if not INTERPRETED else [(1, 2, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_schedule_of_steps(
    dtype: torch.dtype, key_heads: int, heads: int, dim: int, drafts: bool
) -> None:
    torch.manual_seed(0)
    layer = Layer(key_heads, heads, dim, drafts, dtype)
    ours = on_device(layer.memory)
    limit = 2e-5 if dtype == torch.float32 else 3e-2
    for requests, num_decode in SCHEDULE:
        step = layer.step(requests, num_decode)
        check_step(layer, ours, step, limit)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_drafts_that_are_rejected_leave_nothing(width: int) -> None:
    """Rows accept different numbers of tokens; the others of a step are computed again."""
    torch.manual_seed(1)
    layer = Layer(1, 2, 32 if INTERPRETED else 128, True, torch.float32)
    ours = on_device(layer.memory)
    starts = {0: 0, 1: 0}
    for i in range(12):
        lengths = (30, 17) if i == 0 else (width, width)
        requests = [(row, starts[row], lengths[row]) for row in starts]
        step = layer.step(requests, 0 if i == 0 else 2)
        check_step(layer, ours, step, 2e-5)
        for row in starts:
            starts[row] += lengths[row] if i == 0 else int(torch.randint(1, width + 1, ()))


def test_a_chunk_after_drafts_folds_more_than_a_page() -> None:
    """The drafts begin in one page and end in the next, so the state stands a page behind."""
    torch.manual_seed(3)
    layer = Layer(1, 2, 32 if INTERPRETED else 128, True, torch.float32)
    ours = on_device(layer.memory)
    for start, length, num_decode in ((0, 31, 0), (31, 4, 1), (35, 20, 0)):
        step = layer.step([(0, start, length)], num_decode)
        check_step(layer, ours, step, 2e-5)


def test_more_requests_enter_a_page_than_one_program_moves() -> None:
    """A program moves the states of 16 requests. One of three rows stays in its page here."""
    torch.manual_seed(4)
    layer = Layer(1, 3, 32 if INTERPRETED else 128, False, torch.float32, rows=18)
    for part in layer.memory[1:]:
        part.normal_()
    layer.memory.keys.div_(layer.memory.keys.shape[-1] ** 0.5)
    layer.memory.decays.abs_().neg_()
    requests = []
    for row in range(18):
        stands, start = ((0, 16), (16, 32), (16, 20))[row % 3]
        layer.boundaries[row] = stands
        if stands:
            layer.memory.state[row].normal_()
        requests.append((row, start, 1))
    ours = on_device(layer.memory)
    check_step(layer, ours, layer.step(requests, 18), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gated_norm(dtype: torch.dtype) -> None:
    from minisgl.kernel.triton import delta as kernels

    x, weight = torch.randn(5, 3, 64).to(dtype), torch.randn(64).to(dtype)
    gate = torch.randn(5, 500).to(dtype)[:, 7 : 7 + 3 * 64]
    expected = gated_norm(x, weight, gate, 1e-6)
    out = kernels.gated_norm(*(y.to(DEVICE) for y in (x, weight, gate)), 1e-6)
    assert error(out, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.fixture
def one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles the first configuration of each kernel that it tunes.

    Results do not depend on the choice, and fla-core's 34 configurations compile for a minute.
    """
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_first(self: Any, *args: object, **kwargs: object) -> object:
        monkeypatch.setattr(self, "configs", self.configs[:1])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Autotuner, "run", run_first)


def test_a_schedule_as_fla_core(one_configuration: None) -> None:
    """fla-core goes on from its own states, and both get the same tokens after the convolution."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs the package fla-core")
    from minisgl.kernel.triton import delta as kernels
    from minisgl.kernel.triton.delta_chunk import prepare

    def run(state: Tensor, tokens: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs and the next state. Prompts and single tokens have a kernel each.

        Copies begin at multiples of 16. For another address Triton compiles a kernel again.
        """
        q, k, v, g, beta = (x[None].clone() for x in tokens)
        is_step = q.shape[1] == 1
        rule = fla.fused_recurrent_gated_delta_rule if is_step else fla.chunk_gated_delta_rule
        states = {"initial_state": state[None], "output_final_state": True}
        out, after = rule(q, k, v, g, beta=beta, scale=1.0, **states)
        return out[0], after[0]

    torch.manual_seed(2)
    # On a GPU fla-core computes float32 in TF32.
    dtype, dim, limit = (torch.float32, 32, 2e-5) if INTERPRETED else (torch.bfloat16, 128, 3e-2)
    layer = Layer(1, 3, dim, False, dtype)
    ours, weights = on_device(layer.memory), on_device(layer.weights)
    states = torch.zeros(ROWS, 3, dim, dim, device=DEVICE)
    for requests, num_decode in SCHEDULE:
        step = layer.step(requests, num_decode)
        inputs, norm = layer.inputs(step)
        on_gpu = [x.to(DEVICE) for x in inputs]
        common, norm = (weights, ours, on_device(step)), on_device(norm)
        tokens = prepare(*on_gpu, *common)
        out = kernels.gated_delta(*on_gpu, *common, norm)
        expected = torch.empty_like(tokens.v)
        for row, start, length, first, _, target in zip(
            *(x.tolist() for x in step[:6]), strict=True
        ):
            cut, end = first + max(target - start, 0), first + length
            for part in (slice(first, cut), slice(cut, end)):
                if part.start < part.stop:
                    expected[part], states[row] = run(states[row], (x[part] for x in tokens))
                if part.stop == cut > first:  # our state stands here
                    assert error(ours.state[row], states[row].cpu()) < limit, (row, requests)
        assert error(out, gated_norm(expected, *norm).cpu()) < limit, (requests, num_decode)
