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
INT4 = FP8_KV | {"quantization": "int4"}
ON_24_GB = INT4 | {"max_running_reqs": 4, "max_seq_len": 16_384, "memory_ratio": 0.16}
# Pages of 16 tokens of starts on one H200. Those of 8B in bfloat16 and of 27B had blocks for steps
# and graphs (bench/notebook/2026-11-28-memory.md), the others did not (2026-11-26-starts.md).
RECORDED = [
    ("qwen3-0.6b", {}, 71_877),
    ("qwen3-8b", {}, 49_116),
    ("qwen3-14b", {}, 38_966),
    ("qwen3-8b", FP8_KV, 96_321),
    ("qwen3-8b", INT4, 104_590),
    ("qwen3.6-27b", ON_24_GB, 3_773),
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


def test_the_parts_of_a_plan_are_those_of_a_start_on_24_gb(tmp_path: Path) -> None:
    """The bar is 3 % of the memory that the start may use, 22.3 GiB of an H200."""
    allowed, left, context = 23_917_452_328, 1_993_825_320, int(0.16 * 597 * 2**20)
    steps, graphs = 2_487_222_272, 832_569_344
    loaded = allowed - left - steps - graphs
    found = plan(write_model("qwen3.6-27b", tmp_path), **ON_24_GB)
    differences = (
        found.weight_bytes - loaded,
        found.state_bytes + found.remainder_bytes - steps - graphs - context,
        found.kv_bytes - left,
    )
    assert max(map(abs, differences)) < 0.03 * allowed
    assert abs(sum(differences)) < 0.01 * allowed
