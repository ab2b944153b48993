"""Triton's cache keys: the record of an installed package in place of its files."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.kernel.triton_key import recorded_key, use_recorded_key

LIBRARY = "triton/_C/libtriton.so,sha256=abc,415583664"
FRONTEND = "triton/compiler/compiler.py,sha256=def,19000"
BYTECODE = "triton/compiler/__pycache__/compiler.cpython-312.pyc,,"
OTHER = "triton-9.0.dist-info/METADATA,sha256=xyz,1700"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package that looks like Triton, and return its __init__.py."""
    runtime, info = tmp_path / "triton" / "runtime", tmp_path / "triton-9.0.dist-info"
    runtime.mkdir(parents=True)
    info.mkdir()
    for file in (tmp_path / "triton" / "__init__.py", runtime / "__init__.py"):
        file.touch()
    (runtime / "cache.py").write_text("def triton_key():\n    return 'hash of the files'\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in triton_modules():
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path / "triton" / "__init__.py"
    for name in triton_modules():
        del sys.modules[name]


def triton_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "triton"]


def key_of(installed: Path, *record: str) -> str | None:
    info = installed.parents[1] / "triton-9.0.dist-info"
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return recorded_key(installed)


def test_the_key_changes_with_a_file_of_triton_and_with_no_other_file(installed: Path) -> None:
    key = key_of(installed, LIBRARY, FRONTEND)
    assert key is not None
    assert key.startswith("9.0-")
    assert key_of(installed, OTHER, FRONTEND, BYTECODE, LIBRARY) == key
    assert key_of(installed, LIBRARY, FRONTEND.replace("def", "ghi")) != key


def test_a_record_without_the_compiler_gives_no_key(installed: Path) -> None:
    assert key_of(installed, FRONTEND) is None
    assert key_of(installed, LIBRARY.replace("sha256=abc", ""), FRONTEND) is None


def test_the_record_of_another_installation_gives_no_key(installed: Path, tmp_path: Path) -> None:
    assert key_of(installed, LIBRARY) is not None
    assert recorded_key(tmp_path / "elsewhere" / "triton" / "__init__.py") is None


def test_without_a_package_there_is_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert recorded_key(tmp_path / "triton" / "__init__.py") is None


def test_triton_reads_its_files_only_without_a_record(installed: Path) -> None:
    from triton.runtime import cache  # type: ignore[import-untyped]

    key_of(installed, FRONTEND)
    use_recorded_key()
    assert cache.triton_key() == "hash of the files"
    key = key_of(installed, LIBRARY, FRONTEND)
    use_recorded_key()
    assert cache.triton_key() == key
