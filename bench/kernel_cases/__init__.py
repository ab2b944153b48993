"""Cases of `python -m bench kernels`: kernels on the shapes of published models."""

__all__: list[str] = []
