"""All places name one version, and the wheel has all files of the package."""

import re
import tomllib

import pytest

import minisgl
from tests.repo.test_repository import ROOT, read, tracked

# Patterns whose every match names the version.
PLACES = {
    "CHANGELOG.md": r"(?s)\A.*?^## (\S+)",
    "helm/Chart.yaml": r"^(?:appV|v)ersion: \"?([\d.]+)",
    "helm/ci/cpu-demo-values.yaml": r"tag: (\S+)-cpu$",
    "docker/Dockerfile": r"^ARG VERSION=(.+)$",
    "docker/Dockerfile.cpu": r"^ARG VERSION=(.+)$",
    "k8s-tests/k8s_harness/settings.py": r"/minisgl:(\S+)-cpu\"",
    "docs/README.md": r"minisgl-(\d[\d.]+)",
    "docs/operations.md": r"/minisgl:(\d[\d.]*\d)",
}


@pytest.mark.parametrize("file", PLACES)
def test_versions_are_in_step(file):
    named = re.findall(PLACES[file], read(file) or "", re.MULTILINE)
    assert set(named) == {minisgl.__version__}


def test_wheel_has_every_file_of_the_package():
    """`make release-check` would find a missing file too, but only before a release."""
    project = tomllib.loads(read("pyproject.toml") or "")
    patterns = project["tool"]["setuptools"]["package-data"]["minisgl"]
    folder = ROOT / "minisgl"
    shipped = {path.relative_to(ROOT).as_posix() for each in patterns for path in folder.glob(each)}
    files = {name for name in tracked() if name.startswith("minisgl/")}
    assert {name for name in files - shipped if not name.endswith(".py")} == set()
    assert [each for each in patterns if not [*folder.glob(each)]] == []
