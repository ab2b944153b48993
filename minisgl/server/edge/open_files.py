"""The limit of open files of the API process: connections within it, and failed accepts."""

import asyncio
import errno
import logging
import resource
from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.settings.config import Limits
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OWN_FILES = 96  # 41 with one tokenizer, and room for connections that close
# Files for connections beyond the limit, which the server accepts only to close them.
_MORE_FILES = 768


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a failed accept as an event, of which the log has one line a second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_RESOURCE:
        log_event(logger, logging.ERROR, "accept failed", reason=error.strerror)
    else:
        loop.default_exception_handler(context)


def allow_open_files(limits: Limits, others: int) -> Limits:
    """Raise the limit of open files of this process, and return the limits that fit into it.

    others: files besides those of the process itself and of --max-connections.

    Most systems start processes with a limit of 1,024 files and let them raise it. If the hard
    limit is lower than --max-connections needs, fewer connections leave files for the probe port.
    Raises ConfigError if it is lower than one connection needs.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 2**30
    reserved = _OWN_FILES + others
    fitting = min(limits.max_connections, most - reserved)
    if fitting < 1:
        raise ConfigError(
            f"the server may open {most} files and needs {reserved + 1} or more; raise the hard "
            "limit of open files (ulimit -Hn)"
        )
    if fitting < limits.max_connections:
        logger.warning(
            f"--max-connections {limits.max_connections} is lowered to {fitting}, because this "
            f"process may open {most} files; raise the hard limit of open files (ulimit -Hn)"
        )
    files = min(most, fitting + reserved + _MORE_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    return msgspec.structs.replace(limits, max_connections=fitting)
