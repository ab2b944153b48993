"""The trials of a start find the memory of steps and graphs. The device is emulated."""

from collections.abc import Sequence

import pytest
import torch

from minisgl.engine import trial
from minisgl.engine.graphs import DecodeShape
from minisgl.engine.step import StepLauncher

DEVICE = torch.device("cuda", 0)
MIB = 2**20


class Gpu:
    """Memory of a GPU with torch's allocator, in MiB, as far as a trial reads it.

    A segment of steps has gaps for the buffers of graphs. An engine takes 100, its largest step 500
    without a block, and a graph of each kind 40 and 350.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.used = {"engine": 0, "step": 0, "graphs": 0}
        monkeypatch.setattr(trial.memory, "free_bytes", lambda device: MIB * self.free)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MIB)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 400 * MIB)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch, "empty", self.reserve)

    @property
    def free(self) -> int:
        return 1000 - sum(self.used.values())

    def assemble(self) -> StepLauncher:
        self.events.append("assemble")
        self.used["engine"] = 100
        return object.__new__(StepLauncher)

    def run_largest(self, launcher: StepLauncher) -> None:
        self.events.append("step")
        self.used["step"] = self.used["step"] or 500

    def reserve(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.events.append(f"{num_bytes // MIB} MiB of {dtype} on {device}")
        self.used["step"] = num_bytes // MIB

    def capture(
        self, launcher: StepLauncher, shapes: Sequence[DecodeShape], sizes: Sequence[int]
    ) -> tuple[object, list[int]]:
        self.events.append(f"capture {[shape.reqs for shape in shapes]} {sizes}")
        buffers = 0 if self.used["step"] else 40
        free = [self.free - taken for taken in (0, buffers, buffers + 3, 393, 413)]
        self.used["graphs"] = 373 + buffers
        return object(), [MIB * each for each in free]

    def empty_cache(self) -> None:
        self.events.append("empty cache")
        self.used["step"] = 0


def test_the_trial_has_the_order_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a block before the captures had gaps for the buffers of the graphs.

    The estimate of graphs then missed these buffers: 92 MB in a start of Qwen3-8B.
    """
    gpu = Gpu(monkeypatch)
    shapes = [DecodeShape(reqs, 1) for reqs in (1, 2, 4, 8)]
    sizes = shapes, [16, 32, 64]
    found = trial.run_trial(gpu.assemble, gpu.run_largest, gpu.capture, sizes, DEVICE)
    assert gpu.events == [
        *("assemble", "step", "empty cache", "assemble", "capture [4, 8] [32, 64]"),
        *("330 MiB of torch.uint8 on cuda:0", "step", "empty cache"),
    ]
    assert found.block // MIB == 330, "1.1 times the live tensors of the step"
    assert found.steps == MIB * 100 + MIB * 330, "the engine and the block, without the graphs"
    further = 2 * (3 + 4) + 1 * (20 + 4)
    assert found.graphs == MIB * (413 + further), "each kind counts its own second graph"


def test_an_engine_without_graphs_keeps_no_memory_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    sizes: tuple[list[DecodeShape], list[int]] = ([], [16, 32, 64])
    found = trial.run_trial(
        gpu.assemble, gpu.run_largest, lambda *args: (object(), [MIB * gpu.free]), sizes, DEVICE
    )
    assert found.graphs == 0


def test_the_error_of_too_little_memory_names_each_part_and_the_flags() -> None:
    message = trial.Trial(block=1, steps=3_250, graphs=2_254).remedy(18_678, 12, 8192)
    for part in ("weights take 18678", "8192 prompt tokens 3250", "graphs 2254", "host cache 12"):
        assert part in message
    assert "lower --max-prefill-length" in message
    assert "memory_ratio" in message
