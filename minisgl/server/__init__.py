"""The HTTP server, and the launcher of all processes."""

from minisgl.server.config import Limits, ServerConfig

__all__ = ["Limits", "ServerConfig"]
