"""A second start on a GPU reads the step times of the first one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from tests.patience import patience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The fa2 kernels compile before the engine is ready, so the first start may write the file.
START = """
import logging, sys
from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine

logging.basicConfig(level=logging.INFO)
backend = "flashinfer-fa2"
config = EngineConfig(model_path=sys.argv[1], dummy_weight=True, attention_backend=backend)
engine = Engine(config, SingleCommunicator())
engine.warm_up()
cost = engine.calibrate()
for work in ((1, 1024, 0), (64, 64 * 1024, 0), (2048, 0, 2048 * 2048)):
    print("predicted", cost.predict_s(*work))
print("calibration", round(engine.startup.seconds["calibration"], 2))
"""


def test_the_costs_of_a_second_start_are_those_of_the_first(tmp_path: Path) -> None:
    model = write_model("qwen3-0.6b", tmp_path / "model")
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START, model],
            capture_output=True,
            text=True,
            timeout=patience(540),
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        outputs.append((done.stdout, done.stderr))
    (file,) = (tmp_path / "cache").glob("minisgl/step-times/*.json")
    (first, first_log), (second, second_log) = outputs
    print(first, second, sep="\n")
    assert f"later starts read the step times: {file}" in first_log
    assert f"the step times are those of an earlier start: {file}" in second_log
    predictions = [re.findall("predicted (.*)", output) for output in (first, second)]
    assert predictions[0] == predictions[1]
