"""A chat in the terminal. It uses only the public HTTP API of a server."""

from minisgl.shell.client import ChatClient, ServerError
from minisgl.shell.repl import Shell

__all__ = ["ChatClient", "ServerError", "Shell"]
