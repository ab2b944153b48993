"""Finding, compiling and recording the modules of GPU kernels.

The folder of compiled kernels (cache, folder_cache), the compilation of FlashInfer's modules
(flashinfer_jit), the hash of Triton's installation (triton_key), and the log of compilations
(compile_log). The kernels themselves are in minisgl.kernel.
"""

from minisgl.build.cache import use_kernel_cache
from minisgl.build.compile_log import CompileLog
from minisgl.build.flashinfer_jit import AttentionKernel, compile_missing, compiled
from minisgl.build.triton_key import use_recorded_key

__all__ = [
    "AttentionKernel",
    "CompileLog",
    "compile_missing",
    "compiled",
    "use_kernel_cache",
    "use_recorded_key",
]
