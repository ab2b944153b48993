"""The kernels of Mamba-2 against their references, over steps that mix all requests.

Memory is poisoned first. With TRITON_INTERPRET=1 the same tests run on a CPU, slowly.
"""

import pytest
import torch

from minisgl.kernel.ssd import SsdWeights, gated_group_norm, selective_scan
from tests.gpu.test_delta import DEVICE, INTERPRETED, SCHEDULE, Layer, error, on_device, pytestmark

__all__ = ["pytestmark"]

SHAPES = [(1, 2, 32)] if INTERPRETED else [(1, 8, 128), (2, 4, 64)]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Scan:
    """One layer's weights and memory on both devices, and the boundaries of its rows."""

    def __init__(self, key_heads: int, heads: int, dim: int, drafts: bool, dtype: torch.dtype):
        layer = Layer(key_heads, heads, dim, drafts, dtype)
        bias = torch.randn(layer.width).to(dtype)
        rates = layer.weights.a_log, layer.weights.dt_bias, torch.randn(heads)
        self.layer, self.weights = layer, SsdWeights(layer.weights.conv, bias, *rates)
        self.memory, self.limit = on_device(layer.memory), LIMITS[dtype]

    def check(self, requests: list[tuple[int, int, int]], num_decode: int) -> None:
        from minisgl.kernel.triton import ssd as kernels

        step, memory = self.layer.step(requests, num_decode), self.layer.memory
        (mixed, dt, _), _ = self.layer.inputs(step)
        # The rates are columns of a wider projection.
        wide = torch.cat((mixed, dt), dim=1).to(DEVICE)
        mixed_there, dt_there = wide.split([mixed.shape[1], dt.shape[1]], dim=1)
        expected = selective_scan(mixed, dt, self.weights, memory, step)
        given = mixed_there, dt_there, on_device(self.weights), self.memory, on_device(step)
        out = kernels.selective_scan(*given)
        assert error(out, expected) < self.limit, (requests, num_decode)
        for row in step.rows[step.target > 0].tolist():
            assert error(self.memory.state[row], memory.state[row]) < self.limit, (row, requests)
            assert error(self.memory.tails[row], memory.tails[row]) == 0, (row, requests)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
def test_a_schedule_of_steps(
    dtype: torch.dtype, key_heads: int, heads: int, dim: int, drafts: bool
) -> None:
    torch.manual_seed(0)
    scan = Scan(key_heads, heads, dim, drafts, dtype)
    for requests, num_decode in SCHEDULE:
        scan.check(requests, num_decode)


@pytest.mark.parametrize("width", [2, 8])
def test_drafts_that_are_rejected_leave_nothing(width: int) -> None:
    torch.manual_seed(1)
    scan = Scan(1, 2, 32 if INTERPRETED else 128, True, torch.float32)
    starts = {0: 0, 1: 0}
    for i in range(12):
        lengths = (30, 17) if i == 0 else (width, width)
        requests = [(row, starts[row], lengths[row]) for row in starts]
        scan.check(requests, 0 if i == 0 else 2)
        for row in starts:
            starts[row] += lengths[row] if i == 0 else int(torch.randint(1, width + 1, ()))


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_gated_group_norm(dtype: torch.dtype, groups: int) -> None:
    from minisgl.kernel.triton import ssd as kernels

    x, weight = torch.randn(5, 3 * 64).to(dtype), torch.randn(3 * 64).to(dtype)
    gate = torch.randn(5, 500).to(dtype)[:, 7 : 7 + 3 * 64]
    expected = gated_group_norm(x, weight, gate, groups, 1e-6)
    there = (y.to(DEVICE) for y in (x, weight, gate))
    out = kernels.gated_group_norm(*there, groups, 1e-6)
    assert error(out, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
