"""From the bytes of a body to a closed call. Nothing here needs HTTP, torch or a process."""

__all__: list[str] = []
