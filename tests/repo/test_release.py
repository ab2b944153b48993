"""The package, the chart, the images, the changelog and the pages name one version."""

import re

import pytest

import minisgl
from tests.repo.test_repository import read

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
