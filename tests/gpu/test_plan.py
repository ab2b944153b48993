"""The pages of `minisgl plan` against those that an engine allocates on this GPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig
from minisgl.cost.gpus import Gpu
from minisgl.models.config import load_model_spec
from minisgl.planning.plan import make_plan
from tests.patience import patience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A process of its own, because memory of earlier engines would reduce the free memory.
START = """
import sys
import msgspec
from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS, Engine
from minisgl.drafts import with_speculation
from minisgl.quantization import with_quantizations

config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
extensions = with_speculation(config.speculative, with_quantizations(DEFAULT_EXTENSIONS))
print(Engine(config, SingleCommunicator(), extensions=extensions).num_pages)
"""
ON_24_GB = {
    "quantization": "int4",
    "kv_cache_dtype": "fp8",
    "max_running_reqs": 4,
    "max_seq_len": 16_384,
    "memory_ratio": 0.16,  # of an H200
}


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ("qwen3-0.6b", {}),
        ("qwen3-8b", {}),
        ("qwen3-14b", {}),
        ("qwen3-8b", {"speculative": "ngram"}),
        ("qwen3.6-27b", ON_24_GB),
    ],
)
def test_pages_are_within_two_percent_of_those_of_an_engine(
    shape: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(shape, tmp_path)
    properties = torch.cuda.get_device_properties(0)
    _, total = torch.cuda.mem_get_info(0)
    gpu = Gpu(properties.name, total, copies=properties.major == 9)
    config = EngineConfig(model_path=folder, dummy_weight=True, **flags)
    planned = make_plan(config, load_model_spec(folder), gpu).pages
    done = subprocess.run(
        [sys.executable, "-c", START, msgspec.json.encode(config)],
        capture_output=True,
        text=True,
        timeout=patience(540),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    allocated = int(done.stdout.split()[-1])
    print(f"{shape} {flags} on {gpu.name}: {planned} pages planned, {allocated} allocated")
    assert planned == pytest.approx(allocated, rel=0.02)
