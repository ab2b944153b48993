"""The supported families: each module has a function that builds a ModelSpec from config.json.

Import the names from their modules.
"""

__all__: list[str] = []
