"""The log of an engine that starts with empty caches: it names each compilation and the caches.

This compiles FlashInfer's modules for one dtype and head size, one to two minutes. On Hopper the
first start ends before the fa3 module is compiled.
"""

import os
import re
import subprocess
import sys
import time
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

START = """
import sys
import threading
import time
from minisgl.llm import LLM
from minisgl.utils import setup_logging

setup_logging("engine", "info")
began_s = time.monotonic()
llm = LLM(sys.argv[1], dummy_weight=True, num_pages=64, max_running_reqs=4)
print(f"ready after {time.monotonic() - began_s:.1f} s")
prompt = list(range(1000, 1900))
assert len(llm.generate(prompt, max_tokens=2, ignore_eos=True).token_ids) == 2
for thread in threading.enumerate():
    if thread.name == "compile":
        thread.join()
assert len(llm.generate(prompt, max_tokens=2, ignore_eos=True).token_ids) == 2
print(f"compiled after {time.monotonic() - began_s:.1f} s")
"""


def start(model: str, caches: Path) -> str:
    """Start an engine whose caches are in the folder `caches`, and return its log."""
    environ = {
        "HOME": str(caches),
        "FLASHINFER_WORKSPACE_BASE": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-c", START, model],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=patience(540),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    print(done.stdout)
    return done.stderr


def test_a_first_start_logs_what_it_compiles_and_a_second_start_nothing(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", reason="needs FlashInfer")
    model = write_model("qwen3-0.6b", tmp_path / "model")
    began_s = time.monotonic()
    first = start(str(model), tmp_path / "caches")
    print(f"first start of a process with empty kernel caches: {time.monotonic() - began_s:.0f} s")
    announced = re.findall(r"compiling attention kernel (\d) of (\d): (.+) cache=(\S+)", first)
    numbers = [(int(number), int(total)) for number, total, *_ in announced]
    assert announced, first
    assert numbers == [(number, len(announced)) for number in range(1, len(announced) + 1)]
    assert {name for _, _, name, _ in announced} <= {
        "FlashInfer fa2 bfloat16 128",
        "FlashInfer fa3 bfloat16 128",
    }
    assert len(re.findall(r"compiled attention kernel \d of \d s=\d+", first)) == len(announced)
    (folder,) = {Path(cache) for *_, cache in announced}
    modules = list(folder.glob("*/*.so"))
    assert len(modules) == len(announced), "FlashInfer compiled a module that was not announced"
    (done,) = re.findall(r"compiled Triton kernels done=(\d+) compile_s=\d+ cache=(\S+)", first)
    cubins = list((tmp_path / "caches" / "triton").rglob("*.cubin"))
    assert done == (str(len(cubins)), str(tmp_path / "caches" / "triton"))
    assert not re.findall(
        "compil(?:ing|ed) (?:attention|Triton)", start(str(model), tmp_path / "caches")
    )
