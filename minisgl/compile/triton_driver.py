"""A Triton driver that compiles kernels for an absent GPU and runs no kernel.

At a launch Triton asks its driver for the GPU's architecture, compiles the kernel and a C launcher,
loads the kernel into the GPU and calls the launcher. This driver names the architecture that it is
given and skips the last two steps.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.kernel.chips import REGISTERS, chip_of


@contextmanager
def compiling(folder: Path, arch: int) -> Iterator[None]:
    """Inside the block, a launch with meta tensors compiles its kernel into `folder`.

    arch: 90 means compute capability 9.0. Needs Triton, a C compiler and a libcuda.so.1 to link
    against. That library may be empty. Needs neither a GPU nor its driver. Triton continues to
    use this Triton driver after the block, so the process cannot run kernels any more.
    """
    from triton import knobs
    from triton.runtime import driver

    from minisgl.build.folder_cache import fix_platform_key
    from minisgl.build.triton_key import use_recorded_key

    fix_platform_key()
    use_recorded_key()
    usual_flags, usual_folder = sys.getdlopenflags(), knobs.cache.dir
    # Triton's C module is linked to libcuda. With lazy binding it loads even if libcuda is empty.
    # No function of libcuda is called.
    sys.setdlopenflags(os.RTLD_LAZY)
    knobs.cache.dir = str(folder)
    try:
        driver.set_active(_compiling_driver(arch))
        yield
    finally:
        sys.setdlopenflags(usual_flags)
        knobs.cache.dir = usual_folder


def _compiling_driver(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    compile_launcher = driver.launcher_cls

    def compile_and_skip(source: Any, metadata: Any) -> Any:
        compile_launcher(source, metadata)
        return lambda *args: None

    driver.launcher_cls = compile_and_skip
    # At a launch Triton refuses a kernel that needs more shared memory than a program may have.
    chip = chip_of(arch)
    properties = {
        "max_shared_mem": chip.shared_bytes,
        "multiprocessor_count": chip.multiprocessors,
        "max_num_regs": REGISTERS,
        "warpSize": 32,
    }
    driver.utils.get_device_properties = lambda device: properties
    # Loads no kernel. Returns module, function, registers and spills as 0, and 1,024 threads.
    driver.utils.load_binary = lambda *args: (0, 0, 0, 0, 1024)
    driver.get_current_target = lambda: GPUTarget("cuda", arch, 32)
    # Triton caches compiled kernels by device number. The architecture serves as that number, so
    # the kernels of two architectures stay apart.
    driver.get_current_device = lambda: arch
    driver.get_current_stream = lambda device: 0
    return driver
