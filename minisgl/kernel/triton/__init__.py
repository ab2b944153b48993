"""The Triton kernels, one family per file; minisgl.kernel.dispatch calls them for CUDA tensors.

Importing this package imports nothing. Its modules import triton.
"""

__all__: list[str] = []
