"""Models: configuration, the registry of architectures, the decoder, weight loading.

Import the names from their modules.
"""

__all__: list[str] = []
