"""Keeps the bytecode of Python modules if Python may not write it into the installation.

In each process, Python compiles the source of a module at its first import if it finds no bytecode.
This happens in an image that sets PYTHONDONTWRITEBYTECODE, and with a read-only installation that
was made without bytecode. The import of torch then takes more than twice as long.
"""

import contextlib
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "flashinfer")  # the largest imports of a start
_HEADER_BYTES = 16
_HASH_BASED = 1  # bit 0 of the flags in the header


def keep_bytecode() -> None:
    """Let this process and its children keep bytecode in the folder minisgl/bytecode of the cache.

    The cache is $XDG_CACHE_HOME or ~/.cache, if that is an absolute path.

    Changes nothing if the installation has the bytecode, if Python may write it there, if the user
    has set PYTHONPYCACHEPREFIX, or if the folder cannot be written. With that variable, Python
    ignores the bytecode of the installation; the folder mirrors the paths of all sources.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if sys.pycache_prefix is not None or not os.path.isabs(cache):
        return
    specs = [importlib.util.find_spec(package) for package in _PACKAGES]
    lacking = [spec.name for spec in specs if spec is not None and not _needs_no_folder(spec)]
    if not lacking:
        return
    folder = Path(cache) / "minisgl" / "bytecode"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        names = ", ".join(lacking)
        logger.info("bytecode is kept in %s; these packages have none: %s", folder, names)


def _needs_no_folder(spec: ModuleSpec) -> bool:
    """Whether Python finds bytecode of a package's __init__, or may write it beside the source."""
    if spec.origin is None or spec.cached is None:
        return True
    try:
        if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
            return True
        with open(spec.cached, "rb") as file:
            header = file.read(_HEADER_BYTES)
        flags = int.from_bytes(header[4:8], "little")
        changed_s = int(os.stat(spec.origin).st_mtime) & 0xFFFFFFFF
        is_current = flags & _HASH_BASED or changed_s == int.from_bytes(header[8:12], "little")
        return header[:4] == importlib.util.MAGIC_NUMBER and bool(is_current)
    except OSError:
        return False
