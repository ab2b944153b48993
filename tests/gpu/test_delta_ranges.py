"""FlashInfer's rule in ranges against the reference.

In Triton's interpreter, `recurrence` stands in for FlashInfer's rule.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel.delta import DeltaMemory, Inputs
from minisgl.kernel.states import StateStep
from tests.gpu import test_delta
from tests.gpu.test_delta import (
    DEVICE,
    INTERPRETED,
    SCHEDULE,
    Layer,
    check_step,
    on_device,
)

pytestmark = test_delta.pytestmark


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor, beta: Tensor, scale: float, initial: Tensor,
    *, output_final_state: bool, cu_seqlens: Tensor, output: Tensor, output_state: Tensor,
) -> None:  # fmt: skip
    """FlashInfer's chunk_gated_delta_rule, token by token."""
    ends = cu_seqlens.tolist()
    assert all(a < b for a, b in itertools.pairwise(ends)), "FlashInfer 0.6 would hang"
    group = v.shape[1] // k.shape[1]
    for place, (begin, end) in enumerate(itertools.pairwise(ends)):
        state = initial[place].clone()  # values first
        for token in range(begin, end):
            key, query = (x[token].repeat_interleave(group, 0) for x in (k, q))
            state *= factor[token, :, None, None]
            delta = (v[token] - torch.einsum("hvk,hk->hv", state, key)) * beta[token, :, None]
            state += delta[:, :, None] * key[:, None, :]
            output[token] = scale * torch.einsum("hvk,hk->hv", state, query)
        output_state[place] = state


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of each call of run_ranges."""
    from minisgl.kernel.triton import delta, delta_ranges

    if INTERPRETED:
        monkeypatch.setattr(delta_ranges, "compiled_rule", lambda: recurrence)
        monkeypatch.setattr(delta, "takes_ranges", lambda mixed, memory, step: not step.padded)
    elif delta_ranges.compiled_rule() is None:
        pytest.skip("needs FlashInfer with its compiled kernels")
    calls, run = list[int](), delta_ranges.run_ranges

    def count(inputs: Inputs, memory: DeltaMemory, step: StateStep, out: Tensor) -> None:
        calls.append(step.chunks)
        run(inputs, memory, step, out)

    monkeypatch.setattr(delta, "run_ranges", count)
    return calls


def test_a_schedule_in_ranges(calls: list[int]) -> None:
    """Chunks begin and end anywhere in a page, one has a single token, and rows are decoding."""
    torch.manual_seed(3)
    dtype, dim, limit = (torch.float32, 32, 2e-5) if INTERPRETED else (torch.bfloat16, 128, 3e-2)
    layer = Layer(*((1, 2) if INTERPRETED else (16, 48)), dim, False, dtype)
    ours = on_device(layer.memory)
    for requests, num_decode in SCHEDULE[:6]:
        step = layer.step(requests, num_decode)._replace(padded=False)
        check_step(layer, ours, step, limit)
    assert calls == [3, 2, 2, 2]


def test_a_padded_step_keeps_our_rule(calls: list[int]) -> None:
    """The padding of a CUDA graph's step would be thousands of ranges."""
    from minisgl.kernel.triton import delta as kernels

    dtype, dim = (torch.float32, 32) if INTERPRETED else (torch.bfloat16, 128)
    layer = Layer(*((1, 2) if INTERPRETED else (16, 48)), dim, False, dtype)
    step = layer.step(*SCHEDULE[0])
    inputs, norm = layer.inputs(step)
    device = (x.to(DEVICE) for x in inputs)
    given = on_device(layer.weights), on_device(layer.memory), on_device(step), on_device(norm)
    kernels.gated_delta(*device, *given)
    assert calls == []


CASES: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (True, {"heads": 17, "chunks": 2}),
    (False, {"heads": 31}),
    (False, {"chunks": 0}),
    (False, {"padded": True}),
    (False, {"key_heads": 32}),
    (False, {"channels": 64}),
    (False, {"dtype": torch.float32}),
    (False, {"hopper": False}),
    (False, {"rule": None}),
]


@pytest.mark.parametrize(("taken", "changed"), CASES, ids=str)
def test_takes_ranges(
    taken: bool, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case is one chunk of Qwen3.6-35B-A3B on a Hopper GPU: 32 programs, the fewest."""
    from minisgl.kernel.triton import delta_ranges

    step_of = {"heads": 32, "key_heads": 16, "channels": 128, "chunks": 1, "padded": False}
    given = {**step_of, "dtype": torch.bfloat16, "hopper": True, "rule": recurrence, **changed}
    monkeypatch.setattr(delta_ranges, "is_hopper", lambda: given["hopper"])
    monkeypatch.setattr(delta_ranges, "compiled_rule", lambda: given["rule"])
    layer = Layer(given["key_heads"], given["heads"], given["channels"], False, given["dtype"])
    step = layer.step([(0, 0, 3)], num_decode=0)
    step = step._replace(chunks=given["chunks"], padded=given["padded"])
    mixed = layer.inputs(step)[0][0]
    assert delta_ranges.takes_ranges(mixed, layer.memory, step) == taken
