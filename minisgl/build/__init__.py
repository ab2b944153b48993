"""Finding, compiling and recording the modules of GPU kernels.

The folder of compiled kernels (cache, folder_cache), the compilation of FlashInfer's modules
(flashinfer_jit), the hash of Triton's installation (triton_key), and the log of compilations
(compile_log). The kernels themselves are in minisgl.kernel. This file exports no name: import from
the modules.
"""

__all__: list[str] = []
