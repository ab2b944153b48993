"""The memory of a GPU that the start of an engine logs."""

import pytest
import torch

from minisgl.engine import memory


def test_gaps_of_more_than_three_percent_of_the_weights_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the memory of another engine in the process counted as gaps."""
    model = torch.nn.Linear(100, 100, bias=False)  # 40,000 bytes
    model.register_buffer("norm_weight", torch.zeros(2500))  # 10,000 bytes
    gpu = torch.device("cuda", 0)
    taken = {"memory_allocated": 70_000, "memory_reserved": 90_000}
    for name in taken:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: taken[name])
    before = memory.torch_bytes(gpu)
    taken["memory_allocated"] += 51_000
    for reserved, lines in ((51_400, 0), (51_600, 1)):
        taken["memory_reserved"] = 90_000 + reserved
        memory.log_gaps(model, gpu, before)
        assert len(caplog.messages) == lines
    expected = "weight_bytes=50000 allocated_bytes=51000 reserved_bytes=51600"
    assert caplog.messages[0].endswith(expected)
    cpu = torch.device("cpu")
    memory.log_gaps(model, cpu, memory.torch_bytes(cpu))
    assert len(caplog.messages) == 1
