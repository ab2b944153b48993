"""All schemas of MaskBench through the server's edge: bench/notebook/2026-11-23-structured.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.demo import model_path
from minisgl.structured.library import load_tokenizer
from tests.unit.structured.maskbench import MaskBench

pytestmark = pytest.mark.proof

SOURCE = "https://github.com/guidance-ai/jsonschemabench"
# llguidance writes properties in the order of the schema and integers without a point, so that it
# refuses some valid instances. The numbers are those of llguidance 1.9.1.
MOST_WRONGLY_REFUSED = 36
MOST_REFUSED = 1820


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of MaskBench: from the folder in MASKBENCH_DATA, or from a clone."""
    if given := os.environ.get("MASKBENCH_DATA"):
        return Path(given)
    command = ["git", "clone", "-q", "--depth", "1", SOURCE, str(tmp_path / "bench")]
    done = subprocess.run(command, capture_output=True, text=True)
    if "Could not resolve host" in done.stderr or "unable to access" in done.stderr:
        pytest.skip(f"{SOURCE} cannot be reached here")
    assert done.returncode == 0, done.stderr
    return tmp_path / "bench" / "maskbench" / "data"


def test_no_invalid_instance_of_maskbench_is_accepted(folder: Path) -> None:
    files = ((path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    report = MaskBench(load_tokenizer(str(model_path()), (0, 2))).run(files)
    sys.stdout.write(
        f"schemas {report.schemas}, refused {len(report.refused)}, instances {report.instances}, "
        f"invalid accepted {len(report.wrongly_taken)}, "
        f"valid refused {report.wrongly_refused}\n"
    )
    assert report.schemas >= 11_305
    assert report.wrongly_taken == []
    assert len(report.wrongly_refused) <= MOST_WRONGLY_REFUSED
    assert len(report.refused) <= MOST_REFUSED
