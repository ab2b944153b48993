"""Every kernel compiles for GPUs that the tests do not have, within their memory and registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.venvs import pip

pytestmark = pytest.mark.proof

ROOT = Path(__file__).resolve().parents[2]
# Products of linear layers on Hopper. Other GPUs run torch's products.
HOPPER_ONLY = {
    "linear._linear",
    "linear_tiles.linear",
    "fp8_linear._linear",
    "packed_tiles._linear",
}
# On Hopper, NVFP4 and groups of 32 and 64 alone take this product; no model here has them.
OTHER_GROUPS = {"packed_linear._linear"}
# Kernels with more than 99 KiB; moe_grouped has their products for smaller GPUs.
LARGE_ONLY = {"moe_tiles._gate_up", "moe_tiles._down"}
# They run with FlashInfer's rule only, and these processes have no FlashInfer.
RANGES = {"delta_ranges._order", "delta_ranges._begin", "delta_ranges._end"}
FP8_ONLY = {"fp8_few._gate_up", "fp8_few._down", "fp8_quantise._quantise"}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process that finds Triton, an empty driver library and no FlashInfer."""
    folder = tmp_path_factory.mktemp("triton")
    pins = (ROOT / "docker" / "constraints-gpu.txt").read_text()
    (triton,) = re.findall(r"^triton==\S+$", pins, re.M)
    pip(Path(sys.executable), "install", "-q", "--no-deps", f"--target={folder}", triton)
    driver = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(driver), "-x", "c"]
    subprocess.run([*command, os.devnull], check=True)
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").touch()
    paths = f"{ROOT}{os.pathsep}{folder}"
    added = {"PYTHONPATH": paths, "TRITON_LIBCUDA_PATH": str(folder)}
    return os.environ | added | {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize(
    ("arch", "absent"),
    [
        (80, HOPPER_ONLY | LARGE_ONLY | FP8_ONLY),
        (89, HOPPER_ONLY | LARGE_ONLY),
        (90, OTHER_GROUPS),
        (100, HOPPER_ONLY),
        (120, HOPPER_ONLY | LARGE_ONLY),
    ],
)
def test_every_kernel_compiles_for_an_absent_gpu(
    arch: int, absent: set[str], environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.proof.chip_kernels", str(arch), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["absent"]) == absent | RANGES
    assert found["too_large"] == []
    print(arch, "registers that spill to memory, in bytes:", *found["spilling"], sep="\n")
