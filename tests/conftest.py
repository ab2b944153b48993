"""Fixtures of all tests."""

import logging
from collections.abc import Iterator

import pytest


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
