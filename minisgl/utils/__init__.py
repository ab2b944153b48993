"""Small helpers without a subject of their own. Nothing here loads torch."""

from minisgl.utils.logging import setup_logging
from minisgl.utils.naming import near_names
from minisgl.utils.supervise import (
    CONFIG_EXIT,
    Child,
    ChildExit,
    Supervisor,
    bind_to_parent,
    describe_exit,
    read_payload,
)

__all__ = [
    "CONFIG_EXIT",
    "Child",
    "ChildExit",
    "Supervisor",
    "bind_to_parent",
    "describe_exit",
    "near_names",
    "read_payload",
    "setup_logging",
]
