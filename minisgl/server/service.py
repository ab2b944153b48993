"""What the routes need of the process that serves them."""

from typing import Protocol

from minisgl.message import SchedulerStats
from minisgl.server.config import ServerConfig
from minisgl.server.engine_client import EngineClient
from minisgl.server.lifecycle import Lifecycle


class Service(Protocol):
    """The API server, or a test in its place."""

    config: ServerConfig
    client: EngineClient
    lifecycle: Lifecycle
    stats: SchedulerStats | None

    def stuck(self) -> bool:
        """Some process hangs."""

    def stalled(self) -> bool:
        """The scheduler makes no progress, or some process hangs."""
