"""Fixtures of all tests."""

import logging
import os
from collections.abc import Generator, Iterator

import pytest

from tests.examples import register_profiles
from tests.hang_guard import HangGuard, HangLimits

# `--hypothesis-profile` may choose another profile after this.
register_profiles()

# Files of the unit tests take seconds each, so they come last.
_LONGEST_FIRST = ("process", "parity", "browser", "image", "evaluation", "chart", "unit")

# Docker and package managers work outside the processes of a proof, or wait for the network.
_PROOF = HangLimits(idle_s=3600.0, total_s=3600.0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo the logging set-up of a command that a test runs in its own process."""
    root, package = logging.getLogger(), logging.getLogger("minisgl")
    handlers, levels = list(root.handlers), (root.level, package.level)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(levels[0])
    package.setLevel(levels[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide the certificates of the system: no test needs them, and each HTTP client loads them.

    This takes 50 ms of CPU time, and a test that waits for a server makes many clients. A proof may
    use the network.
    """
    if item.get_closest_marker("proof"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", os.devnull)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by folder, long files first, so that no worker ends with one of them."""
    places = {f"tests/{name}": place for place, name in enumerate(_LONGEST_FIRST)}
    last = len(places) - 1
    items.sort(key=lambda item: places.get("/".join(item.nodeid.split("/")[:2]), last))


def pytest_configure(config: pytest.Config) -> None:
    def limits_of(item: pytest.Item) -> HangLimits:
        return _PROOF if item.get_closest_marker("proof") else HangLimits()

    config.pluginmanager.register(HangGuard(limits_of), HangGuard.__name__)
