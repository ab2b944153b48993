"""The trials of a start find the memory of steps and graphs. The device is emulated."""

import pytest
import torch

from minisgl.engine import trial
from minisgl.engine.graphs import DecodeShape
from minisgl.engine.step import StepLauncher

GPU = torch.device("cuda", 0)


def test_the_largest_step_runs_again_in_a_block_of_its_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step needs an assembled engine and the block, and nothing else that torch kept."""
    events: list[str] = []
    launchers = iter([object.__new__(StepLauncher) for _ in range(2)])
    memory = {"allocated": 500, "peak": 2000}

    def assemble() -> StepLauncher:
        events.append("assemble")
        return next(launchers)

    def run_largest(launcher: StepLauncher) -> None:
        events.append("step")
        memory["peak"] = 1200

    def empty(num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        events.append(f"{num_bytes} bytes of {dtype} on {device}")

    def forget_peak(device: torch.device) -> None:
        memory["peak"] = memory["allocated"]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: memory["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget_peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty cache"))
    monkeypatch.setattr(torch, "empty", empty)
    _, block = trial.step_in_block(assemble, run_largest, GPU)
    assert block == 770, "a tenth of it is for gaps"
    reserved = "770 bytes of torch.uint8 on cuda:0"
    assert events == ["assemble", "step", "empty cache", "assemble", reserved, "step"]


@pytest.mark.parametrize(("left", "expected"), [(900, 100 + 2 * (3 + 2) + 1 * (20 + 2)), (1000, 0)])
def test_graphs_take_the_memory_of_the_trial_and_of_the_graphs_that_it_lacks(
    left: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind counts its own second graph. Rehearsals of the trial take memory of steps."""
    mib = 2**20
    shapes = [DecodeShape(reqs, 1) for reqs in (1, 2, 4, 8)]
    captured: list[tuple[object, object]] = []

    def capture(decode: object, pieces: object) -> tuple[object, list[int]]:
        captured.append((decode, pieces))
        return object(), [free * mib for free in (1000, 960, 957, 600, 580)]

    monkeypatch.setattr(trial.memory, "free_bytes", lambda device: left * mib)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert trial.graph_bytes(capture, shapes, [16, 32, 64], GPU) == expected * mib
    assert captured == [(shapes[-2:], [32, 64])]


def test_the_error_of_too_little_memory_names_each_part_and_the_flags() -> None:
    message = trial.Taken(18_678, 3_250, 2_254, 12).remedy(8192)
    for part in ("weights take 18678", "8192 prompt tokens 3250", "graphs 2254", "host cache 12"):
        assert part in message
    assert "lower --max-prefill-length" in message
    assert "memory_ratio" in message
