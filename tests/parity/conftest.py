"""Models are built once per test run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.models import build_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a family's model, built on first use."""
    folder: Path = tmp_path_factory.mktemp("models")
    return lambda family: build_model(family, folder)
