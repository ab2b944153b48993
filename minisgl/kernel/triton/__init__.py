"""The GPU kernels, one family per file; minisgl.kernel.dispatch chooses them for CUDA tensors.

Importing this door loads nothing, its modules load triton: machines without it never do.
"""

__all__: list[str] = []
