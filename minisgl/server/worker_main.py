"""Main of every child process: `python -m minisgl.server.worker_main NAME FD`.

FD holds a ChildSpec as JSON, and stays open as the pipe that the child's life hangs on.
Only the scheduler loads torch; the others import what their role needs and nothing more.
"""

import contextlib
import logging
import os
import signal
import sys

import msgspec

from minisgl.core import ConfigError, InvariantBroken, MinisglError
from minisgl.server.config import ChildSpec
from minisgl.utils import setup_logging, supervise

logger = logging.getLogger(__name__)


def main() -> None:
    """Run one role until the parent says otherwise; report a fatal error as one line."""
    life_fd = int(sys.argv[-1])
    spec = msgspec.json.decode(supervise.read_payload(life_fd), type=ChildSpec)
    supervise.bind_to_parent(spec.parent_pid, life_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells when to stop
    setup_logging(spec.name, spec.config.log_level, spec.config.log_format)
    try:
        _run(spec)
    # The gate of the process. What minisgl raises on purpose is told in one line; anything else,
    # and a broken invariant, is a bug and logged once with its traceback.
    except Exception as error:
        on_purpose = isinstance(error, MinisglError) and not isinstance(error, InvariantBroken)
        if not on_purpose:
            logger.exception("process failed")
        _report(spec, str(error) if on_purpose else f"{type(error).__name__}: {error}")
        logging.shutdown()
        sys.stdout.flush()
        # Not sys.exit: threads of libraries must not keep a failed process alive.
        os._exit(supervise.CONFIG_EXIT if isinstance(error, ConfigError) else 1)


def _run(spec: ChildSpec) -> None:
    config = spec.config
    model_path = config.engine.model_path
    if spec.role == "api":
        from minisgl.server.process import run_api

        run_api(spec)
    elif spec.role == "tokenizer":
        from minisgl.tokenizer import run_tokenizer

        limits = config.limits
        most_s, most_chars = limits.template_timeout_s, limits.max_template_chars
        run_tokenizer(spec.name, model_path, spec.socket_dir, most_s, most_chars)
    elif spec.role == "detokenizer":
        from minisgl.tokenizer import run_detokenizer

        run_detokenizer(model_path, spec.socket_dir)
    else:
        from minisgl.scheduler import run_scheduler

        run_scheduler(
            config.engine, config.scheduler, tp_rank=spec.index, socket_dir=spec.socket_dir
        )


def _report(spec: ChildSpec, reason: str) -> None:
    """Tell the launcher why; short enough for one atomic write."""
    line = " ".join(reason.split()) or "no reason given"
    with contextlib.suppress(OSError):
        os.write(spec.reason_fd, f"{spec.name}\t{line}"[:2000].encode("utf-8", "replace") + b"\n")


if __name__ == "__main__":
    main()
