"""Small helpers without a subject of their own. Nothing here loads torch."""

from minisgl.utils.logging import log_event, logs_are_json, setup_logging
from minisgl.utils.naming import near_names
from minisgl.utils.process import process_age_s
from minisgl.utils.supervise import (
    CONFIG_EXIT,
    Child,
    ChildExit,
    Supervisor,
    bind_to_parent,
    describe_exit,
    read_payload,
    spawn_child,
)

__all__ = [
    "CONFIG_EXIT",
    "Child",
    "ChildExit",
    "Supervisor",
    "bind_to_parent",
    "describe_exit",
    "log_event",
    "logs_are_json",
    "near_names",
    "process_age_s",
    "read_payload",
    "setup_logging",
    "spawn_child",
]
