"""Triton's cache keys: the record of an installed package in place of its files."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl.build.cache import current_versions
from minisgl.build.triton_key import recorded_key, use_recorded_key

LIBRARY = "triton/_C/libtriton.so,sha256=abc,415583664"
FRONTEND = "triton/compiler/compiler.py,sha256=def,19000"
BYTECODE = "triton/compiler/__pycache__/compiler.cpython-312.pyc,,"
OTHER = "triton-9.0.dist-info/METADATA,sha256=xyz,1700"


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package that looks like Triton, and return the folder of its record."""
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
    yield info
    for name in triton_modules():
        del sys.modules[name]


def triton_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "triton"]


def key_of(info: Path, *record: str) -> str | None:
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return recorded_key()


def test_the_key_changes_with_a_file_of_triton_and_with_no_other_file(info: Path) -> None:
    key = key_of(info, LIBRARY, FRONTEND)
    assert key is not None
    assert key.startswith("9.0-")
    assert current_versions()["triton"] == key
    assert key_of(info, OTHER, FRONTEND, BYTECODE, LIBRARY) == key
    assert key_of(info, LIBRARY, FRONTEND.replace("def", "ghi")) != key


def test_a_record_without_the_compiler_gives_no_key(info: Path) -> None:
    assert key_of(info, FRONTEND) is None
    assert key_of(info, LIBRARY.replace("sha256=abc", ""), FRONTEND) is None
    assert current_versions()["triton"] == "9.0"


def test_the_record_of_another_installation_gives_no_key(
    info: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_of(info, LIBRARY) is not None
    first = tmp_path / "first"
    (first / "triton").mkdir(parents=True)
    (first / "triton" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(first))
    assert recorded_key() is None


def test_without_triton_there_is_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert recorded_key() is None


def test_triton_reads_its_files_only_without_a_record(info: Path) -> None:
    from triton.runtime import cache  # type: ignore[import-untyped]

    key_of(info, FRONTEND)
    use_recorded_key()
    assert cache.triton_key() == "hash of the files"
    key = key_of(info, LIBRARY, FRONTEND)
    use_recorded_key()
    assert cache.triton_key() == key


def test_the_keys_of_kernels_contain_the_recorded_key(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache", reason="triton is not installed")
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # is set back after the test
    use_recorded_key()
    part = SimpleNamespace(hash=lambda: "part")
    assert cache.get_cache_key(part, part, part, {}).startswith(f"{recorded_key()}-part")
