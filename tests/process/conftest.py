"""One tiny model, one stub server and one real server, shared by tests that leave them intact."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import ServerProcess, run_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.process.tiny_model import build_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    return build_tiny_model(folder)


@pytest.fixture(scope="session")
def stub_server(tiny_model: Path) -> Iterator[ServerProcess]:
    with run_server("--model", str(tiny_model), stub="echo") as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def real_server(tiny_model: Path) -> Iterator[ServerProcess]:
    with run_server("--model", str(tiny_model), "--num-pages", "1024") as server:
        yield server.wait_ready()
