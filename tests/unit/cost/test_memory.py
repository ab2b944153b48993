"""The predicted memory of a rank besides weights and KV pages."""

import json
from pathlib import Path

import torch

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig
from minisgl.cost.gpus import GPUS
from minisgl.cost.memory import remainder_bytes
from minisgl.kvcache.pool import KVSpec
from minisgl.models.config import load_model_spec


def remainder(folder: str, tp_size: int) -> int:
    config = EngineConfig(model_path=folder, tp_size=tp_size)
    spec = KVSpec(1, 128, torch.bfloat16)
    return remainder_bytes(config, load_model_spec(folder), GPUS["H200"], 40_960, spec, 8192, 0)


def test_a_rank_with_a_copy_of_a_kv_head_needs_no_more_memory_than_with_its_own(
    tmp_path: Path,
) -> None:
    """Both have 4 query heads and 1 KV head. The workspace of attention grows with their ratio."""
    folder = Path(write_model("qwen3-30b-a3b", tmp_path))
    shared = remainder(str(folder), tp_size=8)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["num_key_value_heads"] == 4
    file.write_text(json.dumps(config | {"num_key_value_heads": 8}))
    assert shared == remainder(str(folder), tp_size=8)
