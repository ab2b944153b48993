"""How a benchmark stops the server that it has started."""

import subprocess
import sys

from minisgl.benchmark.server_process import stop


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
