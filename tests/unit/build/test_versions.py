"""The parts of FlashInfer 0.6 and 0.7 that differ; FlashInfer is a stand-in."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl.build.flashinfer_jit import AttentionKernel
from minisgl.build.versions import package_obstacle, prefill_generator
from minisgl.compile import flashinfer as compiler


@pytest.mark.parametrize(
    ("names", "fa2"),
    [
        (["gen_batch_prefill_module"], "gen_batch_prefill_module"),  # 0.6
        (
            ["gen_batch_prefill_module", "_gen_batch_prefill_primary_module"],  # 0.7
            "_gen_batch_prefill_primary_module",
        ),
    ],
)
def test_the_compiled_module_is_the_one_that_the_wrappers_run(
    names: list[str], fa2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = SimpleNamespace(**{name: lambda name=name: name for name in names})
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention", SimpleNamespace(modules=modules))
    assert prefill_generator("fa2")() == fa2
    assert prefill_generator("fa3")() == "gen_batch_prefill_module"


def test_both_versions_of_flashinfer_find_the_compiled_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.6 asks for a folder, 0.7 for the modules of each set of GPUs. The second call adds one."""

    def compile_for(name: str, archs: list[int]) -> None:
        library = tmp_path / f"{name}.so"
        library.write_bytes(b"code")
        spec = SimpleNamespace(name=name, jit_library_path=library)
        monkeypatch.setattr(compiler, "compile_modules", lambda kernels: [spec])
        targets = {(arch // 10, f"{arch % 10}a") for arch in archs}
        context = SimpleNamespace(TARGET_CUDA_ARCHS=targets)
        flashinfer = SimpleNamespace(__version__="0.7.2")
        contexts = SimpleNamespace(CompilationContext=lambda: context)
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
        monkeypatch.setitem(sys.modules, "flashinfer.compilation_context", contexts)
        kernel = AttentionKernel("fa2", torch.bfloat16, 128)
        compiler.compile_attention_kernels(tmp_path, [kernel], archs)

    monkeypatch.setattr(os, "environ", os.environ.copy())
    compile_for("first", [90])
    compile_for("second", [90, 100])
    path = tmp_path / "flashinfer_jit_cache" / "__init__.py"
    spec = spec_from_file_location("flashinfer_jit_cache", path)
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    spec.loader.exec_module(package)
    folder = Path(package.get_jit_cache_dir())
    assert (folder / "first" / "first.so").read_bytes() == b"code"
    first, second = package.get_jit_cache_providers()
    assert (first.modules, first.cuda_architectures) == (["first"], ["sm90a"])
    assert (second.modules, second.cuda_architectures) == (["second"], ["sm100a", "sm90a"])
    assert first.version == second.version == package.__version__ == "0.7.2"
    assert first.jit_cache_dir == str(folder)


@pytest.mark.parametrize(
    ("found", "oldest", "reason"),
    [
        ("0.7.2", "0.7", None),
        ("0.7", "0.7", None),
        ("0.6.18", "0.7", "it needs some-kernels 0.7 or later, not 0.6.18 (pip install them)"),
        ("4.0.0b36", "4.0.0b36", None),
        ("4.0.0", "4.0.0b36", None),
        (
            "4.0.0b7",
            "4.0.0b36",
            "it needs some-kernels 4.0.0b36 or later, not 4.0.0b7 (pip install them)",
        ),
    ],
)
def test_a_package_that_is_too_old_is_refused(
    found: str, oldest: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.build.versions.version", lambda package: found)
    assert package_obstacle("some-kernels", oldest, "pip install them") == reason


def test_a_package_that_is_missing_is_refused() -> None:
    reason = package_obstacle("no-such-kernels", "1", "pip install them")
    assert reason == "the package no-such-kernels is not installed (pip install them)"
