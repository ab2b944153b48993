"""How a server that a benchmark started is ended."""

import subprocess
import sys

from minisgl.benchmark.own_server import stop


def test_a_server_that_does_not_end_is_killed() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    command = [sys.executable, "-c", f"{deaf}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process, 0.1)
        assert process.returncode == -9
