"""Lets Triton find kernels in a read-only folder before it looks into its own cache.

The folder has one subfolder per kernel, as Triton's own cache does. It may be copied anywhere: the
files are found by name, and not by the absolute paths that Triton writes into its group files.

The name of a subfolder is Triton's key. The key of a kernel holds Triton's version and the recorded
hash of its files (minisgl/build/triton_key.py), the kernel's source, the types of its arguments,
the GPU architecture and the version of the assembler that Triton brings, but neither the driver nor
the CUDA toolkit. The key of a C module (a launcher) also holds the platform, as Python describes
it.
"""
# mypy: disallow-subclassing-any=False

import json
import os
import sysconfig
from pathlib import Path

from triton import knobs
from triton.runtime.build import platform_key
from triton.runtime.cache import FileCacheManager

from minisgl.core import ConfigError
from minisgl.utils.toolchain import find_c_compiler

# Triton creates its cache managers from a key alone, so the folder goes through the environment.
_FOLDER = "MINISGL_TRITON_AHEAD"
_GROUP = "__grp__"  # prefix of the last file that Triton writes for a kernel
_C_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))  # of a C module, which is a single file


class FolderCache(FileCacheManager):
    """Triton's cache manager with a read-only folder in front.

    If the folder has a complete entry for a key, Triton uses it and no other. Every other entry is
    read from and written to Triton's own cache.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        folder = os.path.join(os.environ[_FOLDER], key)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        complete = any(n.startswith(_GROUP) or n.endswith(_C_SUFFIX) for n in names)
        self._in_folder = complete and not (override or dump)
        if self._in_folder:
            self.key, self.cache_dir, self.lock_path = key, folder, None
        else:
            super().__init__(key, override, dump)

    def get_file(self, filename: str) -> str | None:
        """Path of a file of this entry; None when it does not exist.

        Raises ConfigError for a missing C module that this machine cannot compile.
        """
        found: str | None = super().get_file(filename)
        if found is None and filename.endswith(_C_SUFFIX) and find_c_compiler() is None:
            raise ConfigError(
                f"{os.environ[_FOLDER]} lacks a kernel that this model needs with these flags, and "
                "there is no C compiler: run minisgl compile with the flags of this server"
            )
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of all files of a kernel, by name; None when the kernel is not complete."""
        if not self._in_folder:
            found: dict[str, str] | None = super().get_group(filename)
            return found
        names = json.loads(Path(self._make_path(_GROUP + filename)).read_text())["child_paths"]
        return {name: self._make_path(name) for name in names}


def search_first(folder: Path) -> None:
    """Let this process search `folder` for kernels before Triton's own cache."""
    fix_platform_key()
    os.environ[_FOLDER] = str(folder)
    knobs.cache.manager_class = FolderCache


def fix_platform_key() -> None:
    """Make the keys of Triton's C modules the same on every machine.

    They hold Python's description of the platform, which is longer where the command `file` exists.
    This computes it once with an empty PATH; Triton keeps the result.
    """
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.devnull
    platform_key.cache_clear()
    platform_key()
    os.environ["PATH"] = path
