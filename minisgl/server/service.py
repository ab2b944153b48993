"""What the routes need of the process that serves them."""

from typing import Protocol

from minisgl.message import wire
from minisgl.server.client import EngineClient
from minisgl.server.config import ServerConfig
from minisgl.server.lifecycle import Lifecycle


class Service(Protocol):
    """The API server, or a test in its place."""

    config: ServerConfig
    client: EngineClient
    lifecycle: Lifecycle
    stats: wire.SchedulerStats | None

    def stuck(self) -> bool:
        """Some process hangs."""
