"""Compiles ahead of time every kernel that serving a model needs, without a GPU.

`minisgl compile` fills a folder (kernels.py). A server that is started with --kernel-cache finds
its kernels in that folder (minisgl.build.cache) and compiles nothing.

This file exports no name: import from the modules.
"""

__all__: list[str] = []
