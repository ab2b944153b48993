"""The memory of a GPU that the start of an engine logs."""

import pytest
import torch

from minisgl.engine import memory


def test_gaps_of_more_than_three_percent_of_the_weights_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(100, 100, bias=False)  # 40,000 bytes
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 41_000)
    for reserved, lines in ((41_100, 0), (41_300, 1)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, n=reserved: n)
        memory.log_gaps(model, gpu)
        assert len(caplog.messages) == lines
    expected = "weight_bytes=40000 allocated_bytes=41000 reserved_bytes=41300"
    assert caplog.messages[0].endswith(expected)
    memory.log_gaps(model, torch.device("cpu"))
    assert len(caplog.messages) == 1
