"""Kernels compiled ahead: how they get into a folder without a GPU, and how they are found there.

The folder holds one subfolder for each kernel, as Triton's own cache does, and may be copied
anywhere: what lies in it is found by name, not by the absolute paths that Triton writes down.
Triton's keys hold its version, the kernel's source, its arguments' types, the architecture and
the version of the assembler that it brings; neither driver nor CUDA toolkit. Those of its C parts
hold what Python says of the platform, which it learns from the command `file` where there is one.
"""
# mypy: disallow-subclassing-any=False

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.build import platform_key
from triton.runtime.cache import FileCacheManager

from minisgl.core import ConfigError
from minisgl.kernel.cache import find_compiler

_FOLDER = "MINISGL_TRITON_AHEAD"  # Triton makes its cache managers from a key alone
_GROUP = "__grp__"  # begins the name of what Triton writes last of a kernel
_C_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))  # ends that of a C module, one file


class AheadCache(FileCacheManager):
    """Triton's cache behind a folder that is only read: what is complete in there is never looked
    for elsewhere, and everything else goes where it always goes."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        folder = os.path.join(os.environ[_FOLDER], key)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        complete = any(n.startswith(_GROUP) or n.endswith(_C_SUFFIX) for n in names)
        self._ahead = complete and not (override or dump)
        if self._ahead:
            self.key, self.cache_dir, self.lock_path = key, folder, None
        else:
            super().__init__(key, override, dump)

    def get_file(self, filename: str) -> str | None:
        """Raises ConfigError for a C module that is nowhere and cannot be compiled."""
        found: str | None = super().get_file(filename)
        if found is None and filename.endswith(_C_SUFFIX) and find_compiler() is None:
            raise ConfigError(
                f"{os.environ[_FOLDER]} lacks a kernel that this model needs with these flags, and "
                "there is no C compiler: run minisgl compile with the flags of this server"
            )
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        if not self._ahead:
            found: dict[str, str] | None = super().get_group(filename)
            return found
        names = json.loads(Path(self._make_path(_GROUP + filename)).read_text())["child_paths"]
        return {name: self._make_path(name) for name in names}


def _fix_platform_key() -> None:
    """Make the keys of Triton's C parts those of a machine without the command `file`."""
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.devnull
    platform_key.cache_clear()
    platform_key()
    os.environ["PATH"] = path


def read_first(folder: Path) -> None:
    """Let this process find kernels in `folder` before it looks into Triton's own cache."""
    _fix_platform_key()
    os.environ[_FOLDER] = str(folder)
    knobs.cache.manager_class = AheadCache


class _Dry:
    """What Triton asks of a device before it launches, answered without one."""

    def __init__(self, utils: Any) -> None:
        self._utils = utils

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**31 - 1, "multiprocessor_count": 132}

    def load_binary(self, *args: object) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024


class _Compiler(CudaDriver):
    """Compiles for one architecture, the launchers too, and launches nothing."""

    utils: Any
    launcher_cls: Any

    def __init__(self, arch: int) -> None:
        super().__init__()
        self._arch, self._launcher = arch, self.launcher_cls
        self.launcher_cls = self._compile_launcher
        self.utils = _Dry(self.utils)
        self.get_current_device = lambda: arch  # under which Triton keeps what it has compiled
        self.get_current_stream = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def _compile_launcher(self, source: Any, metadata: Any) -> Any:
        self._launcher(source, metadata)
        return lambda *args: None


@contextmanager
def compiling(folder: Path, arch: int) -> Iterator[None]:
    """Inside, launches on tensors of the device meta compile into `folder` and run nothing.

    arch: 90 for compute capability 9.0. Needs a C compiler and a libcuda.so.1 to link against,
    for which an empty one will do; neither a GPU nor its driver. For a process of its own.
    """
    _fix_platform_key()
    usual_flags, usual_folder = sys.getdlopenflags(), knobs.cache.dir
    sys.setdlopenflags(os.RTLD_LAZY)  # of an empty libcuda no function is ever called
    knobs.cache.dir = str(folder)
    try:
        driver.set_active(_Compiler(arch))
        yield
    finally:
        sys.setdlopenflags(usual_flags)
        knobs.cache.dir = usual_folder
