"""The benchmark of one decode step: drafts of a head, and a machine with little memory."""

import json
from pathlib import Path

import pytest
from torch import Tensor

from bench.step import main
from minisgl.core import ConfigError
from minisgl.drafts import HeadDrafts
from minisgl.engine import StepTensors
from minisgl.engine.step_tensors import Logits
from minisgl.utils import host_memory
from tests.parity.hybrid_models import Heads, save


def test_the_default_step_gives_one_error_on_a_small_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the allocation of 63 GiB of KV pages ended in a traceback."""
    monkeypatch.setattr(host_memory, "cpu_free_bytes", lambda: 8 * 2**30)
    expected = r"weights of 2\.2 GiB and KV pages of 63\.0 GiB do not fit into the 8\.0 GiB of free"
    with pytest.raises(ConfigError, match=expected):
        main(["--device", "cpu"])


def test_a_step_verifies_and_makes_the_drafts_of_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    run = HeadDrafts.after

    def counted(self: HeadDrafts, x: StepTensors, out: Logits, tokens: Tensor) -> None:
        made.append(x.batch.next_drafts)
        run(self, x, out, tokens)

    monkeypatch.setattr(HeadDrafts, "after", counted)
    model = Heads(*save("qwen3_5", tmp_path)).path
    flags = ["--model", model, "--batch", "2", "--context", "40", "--device", "cpu"]
    assert main([*flags, "--drafts", "3", "--speculative", "mtp"]) == 0
    assert set(made) == {3}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["speculative"] == "mtp"
