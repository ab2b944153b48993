"""The folder of kernels compiled ahead: what it takes to be used, and what is said otherwise.

That kernels are found in it is shown by tests/gpu.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.kernel import cache
from minisgl.kernel.cache import check_kernel_cache, filling

FA3 = "fa3 bfloat16 128"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Compiled for 9.0."""
    with filling(tmp_path / "kernels", [90], [FA3]):
        pass
    return tmp_path / "kernels"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder in which programs are found; empty."""
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
    """Not there, interrupted, cut off, or of another make: compilers or not, it says what to do."""
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"no complete set of kernels.*minisgl compile"):
        check_kernel_cache(tmp_path, 90, [])


def test_an_interrupted_compilation_leaves_no_manifest(folder: Path) -> None:
    """Not even the one before: some of what it told of may have been replaced."""
    with pytest.raises(KeyboardInterrupt), filling(folder, [90], [FA3]):
        raise KeyboardInterrupt
    with pytest.raises(ConfigError, match="no complete set"):
        check_kernel_cache(folder, 90, [FA3])


@pytest.mark.parametrize(
    ("arch", "attention", "lack"),
    [
        (100, [], "is for GPUs of compute capability 9.0, this one has 10.0"),
        (90, [FA3, "fa2 bfloat16 64"], r"lacks attention kernels \(fa2 bfloat16 64\)"),
    ],
)
def test_what_is_missing_is_named_unless_it_can_be_compiled(
    folder: Path, tools: Path, arch: int, attention: list[str], lack: str
) -> None:
    install(tools, "gcc")
    if attention:
        with pytest.raises(ConfigError, match=f"{lack}: run minisgl compile again"):
            check_kernel_cache(folder, arch, attention)
        install(tools, "nvcc")
    assert check_kernel_cache(folder, arch, attention) is not None
    (tools / "gcc").unlink()
    with pytest.raises(ConfigError, match=f"{lack}: run minisgl compile again"):
        check_kernel_cache(folder, arch, attention)


@pytest.mark.parametrize("name", ["minisgl", "Python", "triton", "flashinfer-python"])
def test_other_versions_are_named(folder: Path, tools: Path, name: str) -> None:
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


def test_a_file_of_attention_kernels_is_for_the_gpus_of_its_last_compilation(
    folder: Path, tools: Path
) -> None:
    with filling(folder, [80], [FA3]):
        pass
    with pytest.raises(ConfigError, match="lacks attention kernels"):
        check_kernel_cache(folder, 90, [FA3])


def test_kernels_of_other_versions_are_forgotten(
    folder: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.minisgl, "__version__", "9.9")
    with filling(folder, [80], []):
        pass
    with pytest.raises(ConfigError, match=r"is for GPUs of compute capability 8.0, this one has 9"):
        check_kernel_cache(folder, 90, [])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be filled: "), filling(tmp_path / "file", [], []):
        pass


@needs_triton
def test_only_what_is_complete_is_taken(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's folder that only exists, or lacks the file that Triton writes last, is passed
    over: Triton compiles anew into its own cache, as the half-written one may be read-only."""
    from triton import knobs

    from minisgl.kernel.triton import ahead

    monkeypatch.setenv(ahead._FOLDER, str(tmp_path / "ahead"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "own"))
    for key, name in (("done", "__grp__k.json"), ("half", "k.cubin"), ("c", f"m{ahead._C_SUFFIX}")):
        path = tmp_path / "ahead" / key / name
        path.parent.mkdir(parents=True)
        path.write_text('{"child_paths": {"k.cubin": "/elsewhere/k.cubin"}}')
    (tmp_path / "ahead" / "empty").mkdir()
    own = str(tmp_path / "own")
    dirs = {key: ahead.AheadCache(key).cache_dir for key in ("done", "c", "half", "empty", "none")}
    assert {key for key, path in dirs.items() if path.startswith(own)} == {"half", "empty", "none"}
    found = ahead.AheadCache("done").get_group("k.json")
    assert found == {"k.cubin": str(tmp_path / "ahead" / "done" / "k.cubin")}
    assert ahead.AheadCache("half").get_group("k.json") is None


@needs_triton
def test_a_missing_c_module_is_named_where_nothing_can_compile_it(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from minisgl.kernel.triton import ahead

    monkeypatch.setenv(ahead._FOLDER, str(tmp_path / "ahead"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "own"))
    with pytest.raises(ConfigError, match="lacks a kernel that this model needs"):
        ahead.AheadCache("none").get_file(f"launcher{ahead._C_SUFFIX}")
    install(tools, "gcc")
    assert ahead.AheadCache("none").get_file(f"launcher{ahead._C_SUFFIX}") is None
