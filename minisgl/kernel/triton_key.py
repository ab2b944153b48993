"""The part of Triton's cache keys that stands for Triton itself.

Triton hashes its own files, 400 MB, before a process looks up its first kernel. This takes 0.3 to
0.4 s of a start, also in a thread beside the imports. The record of an installed package holds the
SHA-256 of each file, and it takes a millisecond to read.
"""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_COMPILER = "triton/_C/libtriton.so,"  # the beginning of its line in the record


def use_recorded_key() -> None:
    """Let Triton take the hashes of its files from the record of its package.

    Call this function before the first launch of a kernel. The keys are the same on all machines
    that install the same package. Triton reads its files, as usual, if the record does not name the
    compiler, for example because Triton was built in place. Needs Triton.
    """
    import triton
    from triton.runtime import cache as triton_cache

    key = recorded_key(Path(triton.__file__))
    if key is not None:
        triton_cache.triton_key = cache(lambda: key)


def recorded_key(package_file: Path) -> str | None:
    """Return Triton's version with a hash of the recorded hashes; None without such a record.

    package_file: the path of triton/__init__.py. A record of another installation is not used.
    """
    try:
        package = distribution("triton")
    except PackageNotFoundError:
        return None
    if Path(str(package.locate_file("triton/__init__.py"))) != package_file:
        return None
    lines = (package.read_text("RECORD") or "").splitlines()
    # A line is "path,sha256=hash,size". The lines of other files, such as bytecode, have no hash.
    own = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
    if not any(line.startswith(_COMPILER) for line in own):
        return None
    return f"{package.version}-{hashlib.sha256(repr(own).encode()).hexdigest()}"
