"""Small helpers without a subject of their own. Nothing here loads torch."""

from minisgl.utils.logging import log_event, logs_are_json, setup_logging
from minisgl.utils.naming import near_names
from minisgl.utils.process import make_socket_dir, process_age_s
from minisgl.utils.supervise import (
    CONFIG_EXIT,
    Child,
    ChildExit,
    Supervisor,
    bind_to_parent,
    read_payload,
    read_reasons,
    spawn_child,
)

__all__ = [
    "CONFIG_EXIT",
    "Child",
    "ChildExit",
    "Supervisor",
    "bind_to_parent",
    "log_event",
    "logs_are_json",
    "make_socket_dir",
    "near_names",
    "process_age_s",
    "read_payload",
    "read_reasons",
    "setup_logging",
    "spawn_child",
]
