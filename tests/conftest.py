"""Fixtures of all tests."""

import ctypes
import gc
import logging
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.examples import register_profiles
from tests.hang_guard import HangGuard, HangLimits

# The imports and the tests of a run make millions of objects that live on. To look through them
# again and again would take seconds of each worker.
gc.disable()

# `--hypothesis-profile` may choose another profile after this.
register_profiles()

_TESTS = Path(__file__).parent
# The long files are in these folders.
_LONG = ("process", "parity", "browser", "image", "evaluation")
_LONG_PART = 0.8  # part of the run in which a long file may start, so that no worker ends with one

_GPU = _TESTS / "gpu"

# Docker and package managers work outside the processes of a proof, or wait for the network.
_PROOF = HangLimits(idle_s=3600.0, total_s=3600.0)


@pytest.fixture(scope="session", autouse=True)
def shared_models(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Name the folder in which all workers of a run build their models (tests/parity/models.py)."""
    of_worker = tmp_path_factory.getbasetemp()
    of_run = of_worker.parent if hasattr(request.config, "workerinput") else of_worker
    folder = of_run / "models"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_MODELS_FOLDER", str(folder))
        yield


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


@cache
def _can_run_kernels() -> bool:
    """Whether a CUDA driver is installed, or Triton's interpreter replaces it.

    The import of torch would take seconds, and each process of a run asks.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests/gpu where all of its tests would be skipped: it has a third of all tests."""
    if collection_path.is_relative_to(_GPU) and not _can_run_kernels():
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _can_run_kernels():
        terminalreporter.write_line("tests/gpu is left out: no CUDA driver (libcuda.so.1)")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of each folder over the run.

    A test of processes waits more than it computes, and a unit test only computes. The workers
    keep all cores busy if some of them run the first kind while others run the second.
    """
    folders: defaultdict[str, dict[Path, None]] = defaultdict(dict)
    for item in items:
        folders[_folder(item.path)][item.path] = None
    places = {
        path: (place + 0.5) / len(files) * (_LONG_PART if folder in _LONG else 1)
        for folder, files in folders.items()
        for place, path in enumerate(files)
    }
    items.sort(key=lambda item: (places[item.path], item.path))


def _folder(path: Path) -> str:
    """Return the folder of tests/ that holds this file."""
    return path.relative_to(_TESTS).parts[0] if path.is_relative_to(_TESTS) else ""


def pytest_configure(config: pytest.Config) -> None:
    def limits_of(item: pytest.Item) -> HangLimits:
        return _PROOF if item.get_closest_marker("proof") else HangLimits()

    config.pluginmanager.register(HangGuard(limits_of), HangGuard.__name__)
