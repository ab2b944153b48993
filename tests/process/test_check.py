"""`minisgl check` on the demo model."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from minisgl import parity
from minisgl.benchmark.models import write_model
from minisgl.core import ConfigError, EngineConfig, FinishReason
from minisgl.llm.results import Completion
from tests.forks import run_forked
from tests.patience import patience

pytestmark = pytest.mark.process


def test_check_of_the_demo_model_agrees_with_transformers() -> None:
    words = ["minisgl", "check", "--json", "--dtype", "float32", "--device", "cpu"]
    done = run_forked(words, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["tokens"] == 20 * 32
    assert report["agreement"] == 1.0
    assert report["kl_max"] < 1e-4
    assert report["same_from_cache"] == report["same_with_drafts"] == 20
    missed, hit = report["cached_tokens"]
    assert missed < hit
    assert report["accepted_drafts"] > 0


@pytest.mark.parametrize(
    ("dtype", "agreeing", "kl", "same_cached", "same_drafts", "cached", "passes"),
    [
        ("bfloat16", 19, 0.019, 10, 10, 1, True),
        ("bfloat16", 18, 0.0, 20, 20, 1, False),
        ("bfloat16", 20, 0.021, 20, 20, 1, False),
        ("bfloat16", 20, 0.0, 9, 20, 1, False),
        ("bfloat16", 20, 0.0, 20, 9, 1, False),
        ("bfloat16", 20, 0.0, 20, 20, 0, False),
        ("float32", 20, 0.0, 20, 20, 1, True),
        ("float32", 20, 0.0, 19, 20, 1, False),
        ("float32", 20, 0.0, 20, 19, 1, False),
        ("float32", 20, 0.0, 20, 20, 0, False),
    ],
)
def test_check_fails_outside_of_its_bounds(
    dtype: str,
    agreeing: int,
    kl: float,
    same_cached: int,
    same_drafts: int,
    cached: int,
    passes: bool,
) -> None:
    def answers(same: int, cached: int) -> parity.Answers:
        tokens = [[1]] * same + [[2]] * (20 - same)
        done = [Completion("", each, FinishReason.LENGTH, 1, 0) for each in tokens]
        return parity.Answers(done, cached, 0)

    found = [parity.Comparison(index < agreeing, kl, 0.0) for index in range(20)]
    runs = answers(20, 0), answers(same_cached, cached), answers(same_drafts, 0)
    assert parity.report_of(dtype, [[1]] * 20, *runs, found)["passed"] is passes


def test_check_reports_a_fault_of_an_engine_with_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def engine(path: str, **settings: object) -> MagicMock:
        if settings["speculative"] is not None:
            raise ConfigError("the engine with drafts does not start")
        return MagicMock()

    monkeypatch.setattr(parity, "LLM", engine)
    monkeypatch.setattr(parity, "_answers", lambda *_: parity.Answers([], 0, 0))
    config = EngineConfig(model_path=str(write_model("gemma-3-12b", tmp_path)))
    with pytest.raises(ConfigError, match="does not start"):
        parity._minisgl_answers(config)
