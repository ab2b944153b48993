"""The formats of calls with the templates of a package, whose licences keep some out of this tree.

The package is trl at a fixed version. It holds the templates of about forty models.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from minisgl.tool_calls.detect import detect
from minisgl.tool_calls.formats import FORMATS
from tests.patience import patience
from tests.proof.venvs import pip
from tests.unit.tool_calls.answers import load_template

pytestmark = pytest.mark.proof

PACKAGE = "trl==1.16.0"
ROOT = Path(__file__).parents[2]
TESTS = "tests/unit/tool_calls/test_templates.py"
# trl has no template of Mistral and MiniMax. tests/data/templates has those of Mistral.
ELSEWHERE = {"minimax", "mistral", "mistral-v11"}
LIMIT_S = 1800


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The templates with a known format. Those that trl changed for training are left out."""
    pip(Path(sys.executable), "download", "-q", "--no-deps", "-d", str(tmp_path), PACKAGE)
    (wheel,) = tmp_path.glob("*.whl")
    found = tmp_path / "templates"
    found.mkdir()
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = found / Path(name).name
            if path.suffix == ".jinja" and not path.stem.endswith("_training"):
                path.write_bytes(archive.read(name))
                if format_of(path) not in FORMATS:
                    path.unlink()
    return found


def format_of(path: Path) -> str:
    template = load_template(path)
    return detect(template.render)


def test_calls_of_published_templates_are_read_back(folder: Path) -> None:
    formats = {path.stem: format_of(path) for path in folder.iterdir()}
    sys.stdout.write(f"{formats}\n")
    assert set(formats.values()) == set(FORMATS) - ELSEWHERE
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    environment = {**os.environ, "TOOL_TEMPLATES": str(folder)}
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(LIMIT_S),
    )
    sys.stdout.write(done.stdout[-4000:])
    assert done.returncode == 0, done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= len(formats)
