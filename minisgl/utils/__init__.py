"""Logging, child processes and small helpers. Nothing here loads torch."""

from minisgl.utils.logging import log_event, setup_logging
from minisgl.utils.naming import near_names
from minisgl.utils.process import SOCKET_KEY, process_age_s, socket_folder

__all__ = [
    "SOCKET_KEY",
    "log_event",
    "near_names",
    "process_age_s",
    "setup_logging",
    "socket_folder",
]
