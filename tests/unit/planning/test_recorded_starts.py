"""A plan is near the memory that starts on a GPU measured."""

from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig
from minisgl.cost.gpus import GPUS
from minisgl.models.config import load_model_spec
from minisgl.planning.plan import Plan, make_plan

FP8_KV = {"kv_cache_dtype": "fp8"}
# Pages of 16 tokens of starts on one H200: three of 2026-11-23
# (bench/notebook/2026-11-26-starts.md), and two of 2026-11-28 (2026-11-28-third-runs.md). Steps and
# graphs of these starts did not run in blocks yet (engine/segments.py).
RECORDED = [
    ("qwen3-0.6b", {}, 71_877),
    ("qwen3-8b", {}, 49_090),
    ("qwen3-14b", {}, 38_966),
    ("qwen3-8b", FP8_KV, 96_321),
    ("qwen3-8b", FP8_KV | {"quantization": "int4"}, 104_076),
]


def plan(folder: str, **flags: Any) -> Plan:
    config = EngineConfig(model_path=folder, **flags)
    return make_plan(config, load_model_spec(folder), GPUS["H200"])


@pytest.mark.parametrize(("shape", "flags", "pages"), RECORDED)
def test_pages_are_within_a_hundredth_of_a_start_on_an_h200(
    shape: str, flags: dict[str, Any], pages: int, tmp_path: Path
) -> None:
    found = plan(write_model(shape, tmp_path), **flags)
    assert found.pages == pytest.approx(pages, rel=0.01)


def test_a_plan_for_24_gb_is_within_three_percent_of_the_memory_that_a_start_took(
    tmp_path: Path,
) -> None:
    """27B in int4 with 22.4 GiB of an H200, for one request of 16,384 tokens.

    The start of 2026-11-28 without blocks measured these parts and had no memory for KV pages. The
    bytes that blocks save are computed (bench/notebook/2026-11-28-third-runs.md).
    """
    loaded, steps, graphs = int(17.395 * 2**30), 3_250_585_600, 2_254_438_400
    of_steps, of_pieces = 1_881_000_000 - 1_313_000_000, 919_000_000 - 661_000_000
    of_rehearsals = graphs - 1_732_247_552  # the earlier start, whose rehearsals filled gaps
    taken = loaded + steps + graphs - of_steps - of_pieces - of_rehearsals
    flags = {"quantization": "int4", "max_running_reqs": 4, "max_seq_len": 16_384}
    found = plan(write_model("qwen3.6-27b", tmp_path), **FP8_KV, **flags, memory_ratio=0.16)
    planned = found.weight_bytes + found.state_bytes + found.remainder_bytes
    allowed = 0.16 * found.gpu_bytes
    assert abs(planned - taken) < 0.03 * allowed
    assert found.tokens >= 16_384
    assert taken + 16_384 * found.kv_token_bytes < allowed
