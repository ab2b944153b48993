"""`minisgl check` on the demo model."""

import json
import subprocess
import sys

import pytest

from minisgl import parity
from minisgl.core import FinishReason
from minisgl.llm.results import Completion
from tests.patience import patience

pytestmark = pytest.mark.process


def test_check_of_the_demo_model_agrees_with_transformers() -> None:
    command = [sys.executable, "-m", "minisgl", "check", "--json"]
    done = subprocess.run(
        [*command, "--dtype", "float32", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
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
    ("dtype", "agreeing", "kl", "cached", "passes"),
    [
        ("bfloat16", 19, 0.019, [2], True),
        ("bfloat16", 18, 0.0, [1], False),
        ("bfloat16", 20, 0.021, [1], False),
        ("float32", 20, 0.0, [1], True),
        ("float32", 20, 0.0, [2], False),
    ],
)
def test_check_fails_outside_of_its_bounds(
    dtype: str, agreeing: int, kl: float, cached: list[int], passes: bool
) -> None:
    def answers(tokens: list[int]) -> parity.Answers:
        return parity.Answers([Completion("", tokens, FinishReason.LENGTH, 1, 0)], 0, 0)

    found = [parity.Comparison(index < agreeing, kl, 0.0) for index in range(20)]
    report = parity.report_of(dtype, [[1]], answers([1]), answers(cached), None, found)
    assert report["passed"] is passes
