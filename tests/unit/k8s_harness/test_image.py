"""The image is built by the repository's own verb, or not at all."""

from pathlib import Path

import pytest
from k8s_harness.image import build, made_tag
from k8s_harness.settings import Settings, SettingsError

import minisgl
from tests.unit.k8s_harness.commands import Recorder

ROOT = Path(__file__).resolve().parents[3]


def test_builds_by_make() -> None:
    run = Recorder()
    build(Settings(image=f"host/minisgl:{minisgl.__version__}-cpu"), ROOT, run)
    assert run.lines == [f"make -C {ROOT} image-cpu IMAGE=host/minisgl"]


def test_builds_nothing_when_told() -> None:
    run = Recorder()
    build(Settings(image="minisgl:mine", skip_build=True), ROOT, run)
    assert run.lines == []


def test_refuses_a_tag_that_make_would_not_give() -> None:
    assert made_tag(ROOT) == f"{minisgl.__version__}-cpu"
    with pytest.raises(SettingsError, match="--skip-build"):
        build(Settings(image="minisgl:mine"), ROOT, Recorder())
