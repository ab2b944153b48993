"""The packages of the front end do not load torch: its processes start fast and stay small."""

import subprocess
import sys
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
TORCHLESS = (
    "demo",
    "utils",
    "core",
    "protocol",
    "images",
    "message",
    "settings",
    "tokenizer",
    "request",
    "server",
)
PRESENT = [f"minisgl.{n}" for n in TORCHLESS if (ROOT / "minisgl" / n / "__init__.py").is_file()]


def modules_loaded_by(*names: str) -> set[str]:
    """The modules in a new interpreter after it has imported `names`."""
    code = f"import sys\nimport {', '.join(names)}\nsys.stdout.write('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n"))


def test_front_end_packages_together_load_neither_torch_nor_numpy():
    """Numpy takes a quarter of the imports of a tokenizer process, which does not use it."""
    assert not modules_loaded_by(*PRESENT) & {"torch", "numpy"}


def test_workers_load_no_event_loop():
    """Asyncio takes a tenth of the imports of a worker. Only the API server has an event loop."""
    names = ("launch.worker_main", "images", "tokenizer", "tool_calls.detect", "structured.service")
    assert "asyncio" not in modules_loaded_by(*(f"minisgl.{name}" for name in names))


def test_launcher_loads_no_large_library():
    """These imports come before the start of the scheduler, the process with the longest start."""
    loaded = modules_loaded_by(
        "minisgl.__main__", "minisgl.settings.resolve", "minisgl.launch.launcher"
    )
    libraries = {"torch", "numpy", "starlette", "uvicorn", "prometheus_client", "httpx", "asyncio"}
    assert not loaded & libraries


def test_the_check_sees_an_import():
    """Without this test, a check of the wrong modules would pass."""
    loaded = modules_loaded_by("minisgl", "colorsys")
    assert "colorsys" in loaded
    assert "colorsys" not in modules_loaded_by("minisgl")
