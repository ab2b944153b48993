"""HTTP front end and launcher."""

from minisgl.server.config import Limits, ServerConfig

__all__ = ["Limits", "ServerConfig"]
