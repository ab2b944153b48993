"""Models: configuration, the registry of architectures, the decoder, weight loading."""
