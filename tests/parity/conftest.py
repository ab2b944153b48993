"""A fixture that builds each model once per test run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.models import build_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function from a family to the folder of its model, which it builds on first use."""
    folder: Path = tmp_path_factory.mktemp("models")
    return lambda family: build_model(family, folder)
