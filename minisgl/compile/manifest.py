"""Writes the manifest of a kernel cache, which minisgl.build.cache reads."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from minisgl.build.cache import MANIFEST, Manifest, current_versions, read_manifest
from minisgl.core import ConfigError


@contextmanager
def filling(folder: Path, archs: Sequence[int], attention: Collection[str]) -> Iterator[None]:
    """Remove the manifest of `folder`, run the block, and write a new manifest if it succeeds.

    The new manifest adds `archs` to the architectures of the old manifest. A FlashInfer module that
    is compiled again is replaced by a module for `archs` alone. If the old manifest names other
    versions, no process can find its kernels any more, and the new manifest leaves them out.

    archs      GPU architectures of our Triton kernels and of the FlashInfer modules.
    attention  the FlashInfer modules, by str(AttentionKernel).

    Raises ConfigError when the folder cannot be written.
    """
    path, versions = folder / MANIFEST, current_versions()
    old = read_manifest(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"kernel cache {folder} is not writable: {error.strerror}") from None
    yield
    if old is None or old.versions != versions:
        old = Manifest(versions)
    new = Manifest(
        versions,
        sorted({*old.archs, *archs}),
        old.attention | {name: sorted(archs) for name in attention},
    )
    path.with_suffix(".new").write_bytes(msgspec.json.encode(new))
    path.with_suffix(".new").replace(path)
