"""How a benchmark stops the server that it has started, and reads its metrics."""

import subprocess
import sys

import pytest

from minisgl.benchmark import server_process
from minisgl.benchmark.server_process import read_metrics, stop


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    ignores_sigterm = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    )
    command = [sys.executable, "-c", f"{ignores_sigterm}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process, 0.1)
        assert process.returncode == -9


def test_samples_of_one_metric_are_told_apart_by_their_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: both directions of copies had one key, so one sample was lost."""
    page = b"""# TYPE minisgl_host_cache_copied_bytes_total counter
minisgl_host_cache_copied_bytes_total{direction="to_host"} 3.0
minisgl_host_cache_copied_bytes_total{direction="to_gpu"} 5.0
minisgl_pages{rank="0",state="free"} 7.0
minisgl_steps_total{phase="decode"} 9.0
minisgl_open_requests 1.0
"""
    monkeypatch.setattr(server_process, "fetch", lambda url, api_key: page)
    assert read_metrics("http://server") == {
        "minisgl_host_cache_copied_bytes_total:to_host": 3.0,
        "minisgl_host_cache_copied_bytes_total:to_gpu": 5.0,
        "minisgl_pages:free": 7.0,
        "minisgl_steps_total:decode": 9.0,
        "minisgl_open_requests": 1.0,
    }
