"""HTTP front end and launcher. The door for `__main__`: `main(argv)`."""

from minisgl.server.config import Limits, ServerConfig

__all__ = ["Limits", "ServerConfig"]
