"""The part of Triton's cache keys that identifies the installed Triton.

Triton hashes its own files, 400 MB, before a process looks up its first kernel. This takes 0.3 to
0.4 s. In a thread beside the imports it makes the imports longer by as much. The record of an
installed package holds the SHA-256 of each file, and it takes a millisecond to read.

A file of Triton that was edited after the installation does not change this key. Delete Triton's
cache folder after such an edit.
"""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

_COMPILER = "triton/_C/libtriton.so,"  # the beginning of its line in the record


def use_recorded_key() -> None:
    """Let Triton take the hashes of its files from the record of its package.

    Call this function before the first launch of a kernel. The keys are the same on all machines
    that install the same package. Triton reads its files, as usual, if recorded_key() is None.
    Needs Triton.
    """
    from triton.runtime import cache as triton_cache

    key = recorded_key()
    if key is not None:
        triton_cache.triton_key = cache(lambda: key)


def recorded_key() -> str | None:
    """Return Triton's version with a hash of the recorded hashes. Does not import Triton.

    None without Triton, and if no record names the compiler, for example because Triton was built
    in place.
    """
    found = find_spec("triton")
    try:
        package = distribution("triton")
    except PackageNotFoundError:
        return None
    # A record may belong to another installation, which is later in sys.path.
    if found is None or found.origin != str(package.locate_file("triton/__init__.py")):
        return None
    lines = (package.read_text("RECORD") or "").splitlines()
    # A line is "path,sha256=hash,size". The lines of other files, such as bytecode, have no hash.
    own = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
    if not any(line.startswith(_COMPILER) for line in own):
        return None
    return f"{package.version}-{hashlib.sha256(repr(own).encode()).hexdigest()[:16]}"
