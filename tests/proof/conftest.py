"""One demo server for all proofs that use its answers."""

from collections.abc import Iterator

import pytest

from tests.process.harness import ServerProcess, run_server


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    with run_server("--num-pages", "2048") as server:
        yield server.wait_ready()
