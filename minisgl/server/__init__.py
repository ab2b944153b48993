"""The HTTP server, and the launcher of all processes."""

__all__: list[str] = []
