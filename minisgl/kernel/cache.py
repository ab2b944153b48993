"""A folder of kernels compiled ahead: how it is filled, and how a process comes to use it.

    triton/                our own kernels (minisgl.kernel.triton.ahead)
    flashinfer_jit_cache/  FlashInfer's (minisgl.kernel.flashinfer_ahead)
    manifest.json          what all of it fits; written last, so that what is interrupted has none

It may be read-only and may be moved. Whoever uses it still needs a folder of their own for
FlashInfer, which writes down the sources of its kernels before it looks for compiled ones
(FLASHINFER_WORKSPACE_BASE), and for kernels that are not in there (TRITON_CACHE_DIR).
"""

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

import minisgl
from minisgl.core import ConfigError

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PACKAGES = ("triton", "flashinfer-python")


class _Manifest(msgspec.Struct, frozen=True):
    """What the kernels of a folder fit.

    versions   of all that kernels are made by, and looked for by.
    archs      of our own kernels, 90 for compute capability 9.0.
    attention  the archs of FlashInfer's, by the names that attention_kernels gives.
    """

    versions: dict[str, str]
    archs: list[int] = []
    attention: dict[str, list[int]] = {}

    def lacks(self, arch: int, attention: Collection[str]) -> str | None:
        """Why a GPU of `arch` cannot run by this folder alone; None when it can."""
        for name, version in _versions().items():
            found = self.versions.get(name, "none")
            if found != version:
                return f"was made by {name} {found}, this is {name} {version}"
        if arch not in self.archs:
            known = ", ".join(map(_capability, self.archs))
            return f"is for GPUs of compute capability {known}, this one has {_capability(arch)}"
        missing = sorted(name for name in attention if arch not in self.attention.get(name, ()))
        return f"lacks attention kernels ({', '.join(missing)})" if missing else None


@contextmanager
def filling(folder: Path, archs: Sequence[int], attention: Collection[str]) -> Iterator[None]:
    """Around a compilation into `folder`, which counts as done when the block has ended well.

    What is in there already for the same versions stays; an attention kernel of the same name is
    replaced with its archs. Raises ConfigError where nothing can be written.
    """
    path, versions = folder / _MANIFEST, _versions()
    before = _read(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be filled: {error.strerror}") from None
    yield
    if before is None or before.versions != versions:
        before = _Manifest(versions)
    now = _Manifest(
        versions,
        sorted({*before.archs, *archs}),
        before.attention | {name: sorted(archs) for name in attention},
    )
    path.with_suffix(".new").write_bytes(msgspec.json.encode(now))
    path.with_suffix(".new").replace(path)


def use_kernel_cache(folder: Path, arch: int, attention: Collection[str]) -> None:
    """Find kernels in `folder` first. Before the first launch and the import of flashinfer.

    arch, attention: of this GPU, and what it needs of FlashInfer. What the folder lacks is compiled
    where there are compilers. Raises ConfigError as check_kernel_cache.
    """
    lack = check_kernel_cache(folder, arch, attention)
    if lack is not None:
        logger.warning("kernels are compiled at this start: the kernel cache %s %s", folder, lack)
    from minisgl.kernel.triton import ahead

    ahead.read_first(folder / "triton")
    if lack is None:  # FlashInfer takes what it finds by name, whatever GPU it was compiled for
        sys.path.append(str(folder))
    if _nvcc() is None:
        # FlashInfer then says which of its modules is missing, and not that there is no nvcc
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


def check_kernel_cache(folder: Path, arch: int, attention: Collection[str]) -> str | None:
    """What a GPU of `arch` misses in a complete folder, None when nothing.

    Raises ConfigError where that cannot be compiled here, or no compilation was ever completed.
    """
    manifest = _read(folder / _MANIFEST)
    if manifest is None:
        raise ConfigError(
            f"{folder} holds no complete set of kernels: fill it with minisgl compile "
            "(one that was interrupted starts anew)"
        )
    lack = manifest.lacks(arch, attention)
    if lack is not None and (find_compiler() is None or (attention and _nvcc() is None)):
        raise ConfigError(
            f"the kernel cache {folder} {lack}: run minisgl compile again, with this server's "
            "flags and versions, or install nvcc, g++ and ninja"
        )
    return lack


def compiling(folder: Path, arch: int) -> AbstractContextManager[None]:
    """See minisgl.kernel.triton.ahead.compiling; kernels go where use_kernel_cache finds them.

    Raises ConfigError when Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("triton is not installed (pip install minisgl[gpu])")
    from minisgl.kernel.triton import ahead

    return ahead.compiling(folder / "triton", arch)


def find_compiler() -> str | None:
    """The C compiler that Triton takes for what calls its kernels."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def _nvcc() -> str | None:
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def _read(path: Path) -> _Manifest | None:
    """None where there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def _versions() -> dict[str, str]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"  # what C modules are bound to
    versions = {"minisgl": minisgl.__version__, "Python": python}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"
