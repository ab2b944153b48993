"""`minisgl plan`: the capacity of a GPU and the shortest time of a token, from config.json."""

__all__: list[str] = []
