"""Fixtures of all tests."""

import logging
from collections.abc import Iterator

import pytest

from tests.examples import register_profiles
from tests.hang_guard import HangGuard, HangLimits

# `--hypothesis-profile` may choose another profile after this.
register_profiles()

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


def pytest_configure(config: pytest.Config) -> None:
    def limits_of(item: pytest.Item) -> HangLimits:
        return _PROOF if item.get_closest_marker("proof") else HangLimits()

    config.pluginmanager.register(HangGuard(limits_of), HangGuard.__name__)
