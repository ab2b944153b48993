"""The kernel cache: when a server may use a folder, and the errors and warnings when it may not.

tests/gpu shows that kernels are found in it.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.build import cache
from minisgl.build.cache import check_kernel_cache
from minisgl.compile.manifest import filling
from minisgl.core import ConfigError

FA3 = "fa3 bfloat16 128"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete kernel cache for compute capability 9.0."""
    with filling(tmp_path / "kernels", [90], [FA3]):
        pass
    return tmp_path / "kernels"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the only one in which this process finds programs."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("CUDA_HOME", str(path))
    monkeypatch.delenv("CC", raising=False)
    return path


def install(tools: Path, *names: str) -> None:
    for name in names:
        (tools / name).touch(mode=0o755)


def test_a_folder_for_this_gpu_lacks_nothing(folder: Path, tools: Path) -> None:
    assert check_kernel_cache(folder, 90, [FA3]) is None
    assert check_kernel_cache(folder, 90, []) is None


@pytest.mark.parametrize("content", [None, "", "{", '{"archs": [90]}'])
def test_a_folder_without_a_manifest_is_refused(tmp_path: Path, content: str | None) -> None:
    """The manifest is missing (an interrupted compilation), empty, cut off, or has other fields."""
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"no complete set of kernels.*minisgl compile"):
        check_kernel_cache(tmp_path, 90, [])


def test_an_interrupted_compilation_leaves_no_manifest(folder: Path) -> None:
    """The old manifest goes too, because the compilation may have replaced its kernels."""
    with pytest.raises(KeyboardInterrupt), filling(folder, [90], [FA3]):
        raise KeyboardInterrupt
    with pytest.raises(ConfigError, match="no complete set"):
        check_kernel_cache(folder, 90, [FA3])


@pytest.mark.parametrize(
    ("arch", "attention", "mismatch"),
    [
        (100, [], "is for GPUs of compute capability 9.0, this one has 10.0"),
        (90, [FA3, "fa2 bfloat16 64"], r"lacks attention kernels \(fa2 bfloat16 64\)"),
    ],
)
def test_missing_kernels_are_an_error_only_without_compilers(
    folder: Path, tools: Path, arch: int, attention: list[str], mismatch: str
) -> None:
    install(tools, "gcc")
    if attention:
        with pytest.raises(ConfigError, match=f"{mismatch}: run minisgl compile again"):
            check_kernel_cache(folder, arch, attention)
        install(tools, "nvcc")
    assert check_kernel_cache(folder, arch, attention) is not None
    (tools / "gcc").unlink()
    with pytest.raises(ConfigError, match=f"{mismatch}: run minisgl compile again"):
        check_kernel_cache(folder, arch, attention)


@pytest.mark.parametrize("name", ["minisgl", "Python", "triton", "flashinfer-python"])
def test_an_error_names_the_package_of_another_version(
    folder: Path, tools: Path, name: str
) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"][name] = "0.0"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=f"was made by {name} 0.0, this is {name} "):
        check_kernel_cache(folder, 90, [])


def test_models_of_several_kinds_share_a_folder(folder: Path, tools: Path) -> None:
    with filling(folder, [80, 90], ["fa2 bfloat16 64"]):
        pass
    assert check_kernel_cache(folder, 90, [FA3, "fa2 bfloat16 64"]) is None
    assert check_kernel_cache(folder, 80, ["fa2 bfloat16 64"]) is None
    with pytest.raises(ConfigError, match="lacks attention kernels"):
        check_kernel_cache(folder, 80, [FA3])


def test_attention_kernels_fit_only_the_gpus_of_their_last_compilation(
    folder: Path, tools: Path
) -> None:
    with filling(folder, [80], [FA3]):
        pass
    with pytest.raises(ConfigError, match="lacks attention kernels"):
        check_kernel_cache(folder, 90, [FA3])


def test_a_new_manifest_does_not_name_kernels_of_other_versions(
    folder: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.minisgl, "__version__", "9.9")
    with filling(folder, [80], []):
        pass
    with pytest.raises(ConfigError, match=r"is for GPUs of compute capability 8.0, this one has 9"):
        check_kernel_cache(folder, 90, [])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not writable: "), filling(tmp_path / "file", [], []):
        pass


@needs_triton
def test_only_complete_entries_are_used(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry without the file that Triton writes last goes to Triton's own cache, because the
    folder may be read-only."""
    from triton import knobs

    from minisgl.build import folder_cache

    monkeypatch.setenv(folder_cache._FOLDER, str(tmp_path / "ahead"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "own"))
    for key, name in (
        ("done", "__grp__k.json"),
        ("half", "k.cubin"),
        ("c", f"m{folder_cache._C_SUFFIX}"),
    ):
        path = tmp_path / "ahead" / key / name
        path.parent.mkdir(parents=True)
        path.write_text('{"child_paths": {"k.cubin": "/elsewhere/k.cubin"}}')
    (tmp_path / "ahead" / "empty").mkdir()
    own = str(tmp_path / "own")
    dirs = {
        key: folder_cache.FolderCache(key).cache_dir
        for key in ("done", "c", "half", "empty", "none")
    }
    assert {key for key, path in dirs.items() if path.startswith(own)} == {"half", "empty", "none"}
    found = folder_cache.FolderCache("done").get_group("k.json")
    assert found == {"k.cubin": str(tmp_path / "ahead" / "done" / "k.cubin")}
    assert folder_cache.FolderCache("half").get_group("k.json") is None


@needs_triton
def test_a_missing_c_module_is_an_error_without_a_c_compiler(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from minisgl.build import folder_cache

    monkeypatch.setenv(folder_cache._FOLDER, str(tmp_path / "ahead"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "own"))
    with pytest.raises(ConfigError, match="lacks a kernel that this model needs"):
        folder_cache.FolderCache("none").get_file(f"launcher{folder_cache._C_SUFFIX}")
    install(tools, "gcc")
    assert folder_cache.FolderCache("none").get_file(f"launcher{folder_cache._C_SUFFIX}") is None
