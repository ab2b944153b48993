"""One simulated replica against the server that was measured with the conversation trace."""

import json
from pathlib import Path

import pytest

from minisgl.benchmark.cli import main

pytestmark = pytest.mark.proof

TRACE = Path(__file__).parents[2] / "bench" / "traces" / "conversation.jsonl"
# bench/notebook/2026-11-22-throughput.md, "The conversation trace": Qwen3-8B on one H200, 6ddb428
MEASURED_TTFT_P50_S, MEASURED_ITL_P50_S, MEASURED_HITS = 1.97, 0.0102, 0.0438


def test_one_simulated_replica_is_within_a_tenth_of_the_measured_server(tmp_path: Path) -> None:
    flags = "--requests 300 --max-prompt 32768 --time-scale 2.53 --num-pages 49173 --share 0.5"
    files = ["--trace", str(TRACE), "--json", str(tmp_path / "run.json")]
    assert main(["fleet", *flags.split(), *files]) == 0
    [run] = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert run["ttft_s"]["p50"] == pytest.approx(MEASURED_TTFT_P50_S, rel=0.1)
    assert run["itl_s"]["p50"] == pytest.approx(MEASURED_ITL_P50_S, rel=0.1)
    assert run["prefix_hit_ratio"] == pytest.approx(MEASURED_HITS, abs=0.001)
