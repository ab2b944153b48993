"""`make image-cpu` builds the image, unless it exists."""

from pathlib import Path

import pytest
from k8s_harness.image import build, made_tag, require_tag
from k8s_harness.settings import Settings, SettingsError

import minisgl
from tests.unit.k8s_harness.commands import Recorder

ROOT = Path(__file__).resolve().parents[3]


def test_make_builds_the_image() -> None:
    run = Recorder()
    build(Settings(image=f"host/minisgl:{minisgl.__version__}-cpu"), ROOT, run)
    assert run.lines == [f"make -C {ROOT} image-cpu IMAGE=host/minisgl"]


def test_skip_build_builds_nothing() -> None:
    run = Recorder()
    settings = Settings(image="minisgl:mine", skip_build=True)
    require_tag(settings, ROOT)
    build(settings, ROOT, run)
    assert run.lines == []


def test_a_tag_that_make_does_not_give_is_refused() -> None:
    assert made_tag(ROOT) == f"{minisgl.__version__}-cpu"
    require_tag(Settings(image=f"host/minisgl:{minisgl.__version__}-cpu"), ROOT)
    with pytest.raises(SettingsError, match="--skip-build"):
        require_tag(Settings(image="minisgl:mine"), ROOT)
