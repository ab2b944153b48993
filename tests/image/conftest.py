"""The CPU image, built once, or the image that MINISGL_TEST_IMAGE names."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import minisgl
from tests.image.engine import docker, why_no_docker
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """The name of the image. BUILD_ARGS may contain mirrors and secrets for `make image-cpu`."""
    if reason := why_no_docker():
        pytest.skip(reason)
    if named := os.environ.get("MINISGL_TEST_IMAGE"):
        yield named
        return
    built = f"minisgl-test:{minisgl.__version__}-cpu"
    make = ["make", "image-cpu", "IMAGE=minisgl-test"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(3000)
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    yield built
    docker("image", "rm", built)
