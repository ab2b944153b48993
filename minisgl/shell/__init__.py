"""A chat in the terminal, over the public HTTP API. Knows nothing of the engine."""

from minisgl.shell.client import ChatClient, ServerError
from minisgl.shell.repl import Shell

__all__ = ["ChatClient", "ServerError", "Shell"]
