"""A chat in the terminal. It uses only the public HTTP API of a server."""

__all__: list[str] = []
