"""The kernel cache: a folder of compiled kernels that a starting engine searches first.

`minisgl compile` (minisgl.compile) fills it:

    triton/                our Triton kernels, one subfolder each, as in Triton's own cache
    flashinfer_jit_cache/  a Python package of compiled FlashInfer modules
    manifest.json          the versions and GPUs that the kernels fit. It is written last. A folder
                           without it is therefore the result of an interrupted compilation

The folder may be read-only, and it may be moved. A process that uses it still needs two writable
folders: FlashInfer writes the sources of its kernels before it looks for compiled ones
(FLASHINFER_WORKSPACE_BASE), and Triton stores kernels that the cache lacks (TRITON_CACHE_DIR).
"""

import importlib.metadata
import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

import minisgl
from minisgl.build.triton_key import recorded_key
from minisgl.core import ConfigError
from minisgl.utils.toolchain import find_c_compiler, find_nvcc

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRITON_FOLDER = "triton"

_PACKAGES = ("triton", "flashinfer-python")


class Manifest(msgspec.Struct, frozen=True):
    """The versions and GPUs that the kernels of a folder fit.

    versions   the versions of the packages that compile the kernels or look them up.
    archs      GPU architectures of our Triton kernels; 90 means compute capability 9.0.
    attention  GPU architectures of each FlashInfer module, by str(AttentionKernel).
    """

    versions: dict[str, str]
    archs: list[int] = []
    attention: dict[str, list[int]] = {}

    def mismatch(self, arch: int, attention: Collection[str]) -> str | None:
        """The reason why a GPU of `arch` cannot run from this folder alone; None if it can.

        attention: the FlashInfer modules that the GPU runs, by str(AttentionKernel).
        """
        for name, version in current_versions().items():
            found = self.versions.get(name, "none")
            if found != version:
                return f"was made by {name} {found}, this is {name} {version}"
        if arch not in self.archs:
            known = ", ".join(map(_capability, self.archs))
            return f"is for GPUs of compute capability {known}, this one has {_capability(arch)}"
        missing = sorted(name for name in attention if arch not in self.attention.get(name, ()))
        return f"lacks attention kernels ({', '.join(missing)})" if missing else None


def use_kernel_cache(folder: Path, arch: int, attention: Collection[str]) -> None:
    """Let this process search `folder` before it compiles a kernel.

    Call this function before the first launch of a kernel and before the import of flashinfer. If
    the folder lacks kernels and this machine has the compilers, the function logs a warning, and
    Triton and FlashInfer compile the kernels.

    arch       architecture of this GPU; 90 means compute capability 9.0.
    attention  the FlashInfer modules that it will run, by str(AttentionKernel).

    Raises ConfigError as check_kernel_cache does.
    """
    mismatch = check_kernel_cache(folder, arch, attention)
    if mismatch is not None:
        logger.warning("this start compiles kernels: the kernel cache %s %s", folder, mismatch)
    from minisgl.build import folder_cache  # imports triton

    folder_cache.search_first(folder / TRITON_FOLDER)
    if mismatch is None:
        # FlashInfer finds a module in this folder by its name, even if it was compiled for another
        # GPU.
        sys.path.append(str(folder))
    if find_nvcc() is None:
        # Without nvcc FlashInfer must not try to compile. If compiling is disabled, its error names
        # the missing module. Otherwise its error would only say that nvcc is missing.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


def check_kernel_cache(folder: Path, arch: int, attention: Collection[str]) -> str | None:
    """The reason why a GPU of `arch` cannot run from `folder` alone, as a phrase; None if it can.

    Raises ConfigError when no compilation into the folder was ever completed, or when this machine
    has no compiler for the kernels that it lacks.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder} holds no complete set of kernels: fill it with minisgl compile "
            "(a compilation that was interrupted must be run again)"
        )
    mismatch = manifest.mismatch(arch, attention)
    if mismatch is not None and (find_c_compiler() is None or (attention and find_nvcc() is None)):
        raise ConfigError(
            f"the kernel cache {folder} {mismatch}: run minisgl compile again, with the flags and "
            "versions of this server, or install nvcc, g++ and ninja"
        )
    return mismatch


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None when it has none that can be read."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def current_versions() -> dict[str, str]:
    """Versions of the packages that compiled kernels depend on, as a manifest holds them.

    The version of Triton includes the recorded hash of its files, if there is one.
    """
    # Triton's launchers are C modules, which fit one minor version of Python.
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = {"minisgl": minisgl.__version__, "Python": python}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    versions["triton"] = recorded_key() or versions["triton"]
    return versions


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"
