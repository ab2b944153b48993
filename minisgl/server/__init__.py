"""The HTTP server: the API process."""

__all__: list[str] = []
