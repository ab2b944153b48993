"""`python -m tests.process.stub_server MODE FLAGS..`: minisgl with the stub scheduler."""

import os
import signal
import sys

from minisgl.core import ConfigError
from minisgl.launch.launcher import launch
from minisgl.settings.resolve import resolve
from minisgl.utils import setup_logging


def main() -> int:
    mode, *flags = sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run the tests, ignores it
    setup_logging("launcher", "info")
    config = resolve(flags, os.environ, find_model=lambda name, revision, weights, check: name)
    command = (sys.executable, "-m", "tests.process.stub_scheduler", mode)
    try:
        return launch(config, scheduler_command=command)
    except ConfigError as error:
        sys.stderr.write(f"minisgl: error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
