"""Small helpers without a subject of their own. Nothing here loads torch."""

__all__: list[str] = []
