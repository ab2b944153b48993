"""The FlashInfer modules that a start compiles, and the lines it logs; FlashInfer is a stand-in."""

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from minisgl.build.flashinfer_jit import AttentionKernel, compile_missing, compiled
from tests.patience import patience

FA2 = AttentionKernel("fa2", torch.bfloat16, 128)
FA3 = AttentionKernel("fa3", torch.bfloat16, 128, window=True)

# A ninja that runs its fifth argument, build.ninja, as a shell script.
NINJA = """#!/bin/sh
exec sh "$5"
"""

# The compiler of this build.ninja writes its process id and then runs for ten minutes.
ENDLESS = """rule endless
  command = echo $$$$ > started && mv started pid && exec sleep 600
build module: endless
"""
COMPILE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from minisgl.build import flashinfer_jit

folder = Path(sys.argv[1])
paths = {"build_dir": folder, "ninja_path": folder / "build.ninja", "lock_path": folder / "lock"}
flashinfer_jit._run_ninja(SimpleNamespace(write_ninja=lambda: None, **paths))
"""


@dataclass
class Spec:
    """The part of FlashInfer's JitSpec that is used."""

    is_compiled: bool
    fails: bool = False
    may_build: threading.Barrier | None = None
    began: Callable[[], object] = lambda: None
    build_dir: Path = Path()

    @property
    def lock_path(self) -> Path:
        return self.build_dir / "lock"

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    def write_ninja(self) -> None:
        self.began()
        if self.may_build is not None:
            self.may_build.wait(timeout=patience())
        self.ninja_path.write_text("echo no nvcc; exit 1" if self.fails else "exit 0")
        self.is_compiled = not self.fails

    def build(self, verbose: bool) -> None:
        raise RuntimeError("JIT compilation is disabled")


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Spec]:
    """FlashInfer's modules by variant; none is compiled."""
    specs = {name: Spec(is_compiled=False, build_dir=tmp_path / name) for name in ("fa2", "fa3")}
    for spec in specs.values():
        spec.build_dir.mkdir()
    (tmp_path / "ninja").write_text(NINJA)
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def gen_batch_prefill_module(variant: str, *arguments: object) -> Spec:
        dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
        assert arguments == (*dtypes, 128, 128, 0, arguments[7], False, False)
        return specs[variant]

    env = SimpleNamespace(FLASHINFER_JIT_DIR="/cache/flashinfer/90a/cached_ops")
    modules = SimpleNamespace(gen_batch_prefill_module=gen_batch_prefill_module)
    attention = SimpleNamespace(modules=modules)
    jit = SimpleNamespace(attention=attention, env=env)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(jit=jit))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention", attention)
    return specs


def test_a_name_says_variant_dtype_head_size_and_masks() -> None:
    assert str(FA2) == "fa2 bfloat16 128"
    assert str(FA3) == "fa3 bfloat16 128 window"
    both = AttentionKernel("fa2", torch.float16, 256, window=True, soft_cap=True)
    assert str(both) == "fa2 float16 256 window soft_cap"


def test_each_missing_module_is_announced_with_its_number_and_the_cache(
    specs: dict[str, Spec], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compile_missing([FA2, FA3])()
    folder = "/cache/flashinfer/90a/cached_ops"
    assert caplog.messages[:2] == [
        f"compiling attention kernel 1 of 2: FlashInfer fa2 bfloat16 128 cache={folder}",
        f"compiling attention kernel 2 of 2: FlashInfer fa3 bfloat16 128 window cache={folder}",
    ]
    done = [f"compiled attention kernel {number} of 2" for number in (1, 2)]
    assert sorted(message.split(" s=")[0] for message in caplog.messages[2:]) == done
    assert all(spec.is_compiled for spec in specs.values())


def test_a_module_that_a_cache_holds_is_not_compiled(
    specs: dict[str, Spec], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    specs["fa2"] = Spec(is_compiled=True, fails=True)
    compile_missing([FA2, FA3])()
    assert "attention kernel 1 of 1: FlashInfer fa3 bfloat16 128 window" in caplog.messages[0]
    caplog.clear()
    compile_missing([FA2, FA3])()
    assert caplog.messages == []


def test_a_compiler_that_fails_ends_the_start(specs: dict[str, Spec]) -> None:
    specs["fa3"].fails = True
    wait = compile_missing([FA2, FA3])
    with pytest.raises(RuntimeError, match="Ninja build failed"):
        wait()


def test_modules_compile_at_the_same_time_as_each_other_and_the_caller(
    specs: dict[str, Spec],
) -> None:
    """Each build waits for the other build and for the caller."""
    specs["fa2"].may_build = specs["fa3"].may_build = threading.Barrier(3)
    wait = compile_missing([FA2, FA3])
    assert not specs["fa2"].is_compiled
    assert not specs["fa3"].is_compiled
    specs["fa2"].may_build.wait(timeout=patience())
    wait()
    assert all(spec.is_compiled for spec in specs.values())


def test_a_start_does_not_wait_for_an_fa3_module_whose_fa2_module_it_has(
    specs: dict[str, Spec], caplog: pytest.LogCaptureFixture
) -> None:
    """The fa3 module compiles after the fa2 module, with the lowest priority."""
    caplog.set_level(logging.INFO)
    late = FA3._replace(window=False)
    specs["fa2"].may_build = threading.Barrier(2)
    specs["fa3"].may_build = threading.Barrier(2)
    priorities: list[int] = []
    specs["fa3"].began = lambda: priorities.append(os.getpriority(os.PRIO_PROCESS, 0))
    wait = compile_missing([FA2, late])
    specs["fa2"].may_build.wait(timeout=patience())
    wait()
    assert specs["fa2"].is_compiled
    found = specs["fa3"].is_compiled
    assert not found
    (thread,) = (each for each in threading.enumerate() if each.name == "compile")
    specs["fa3"].may_build.wait(timeout=patience())
    thread.join(timeout=patience())
    assert specs["fa3"].is_compiled
    assert priorities == [19]
    assert [message.split(" s=")[0] for message in caplog.messages[2:]] == [
        f"compiled attention kernel {number} of 2" for number in (1, 2)
    ]


def test_an_fa3_module_that_fails_in_the_background_is_logged(
    specs: dict[str, Spec], caplog: pytest.LogCaptureFixture
) -> None:
    specs["fa2"].is_compiled, specs["fa3"].fails = True, True
    compile_missing([FA2, FA3._replace(window=False)])()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join(timeout=patience())
    assert caplog.messages == [
        "prompts stay on the fa2 kernels: fa3 bfloat16 128 did not compile: Ninja build failed. "
        "Ninja output:\nno nvcc\n"
    ]


def test_flashinfer_refuses_a_compilation_if_its_flag_forbids_it(
    specs: dict[str, Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    wait = compile_missing([FA2])
    with pytest.raises(RuntimeError, match="JIT compilation is disabled"):
        wait()
    assert not specs["fa2"].is_compiled


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
def test_compilers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text(ENDLESS)
    with subprocess.Popen([sys.executable, "-c", COMPILE, tmp_path]) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        compiler = os.pidfd_open(int((tmp_path / "pid").read_text()))
        process.send_signal(signal.SIGKILL)
    ended, _, _ = select.select([compiler], [], [], 60)
    assert ended == [compiler]
    os.close(compiler)


def test_a_module_is_compiled_once_no_process_builds_it(specs: dict[str, Spec]) -> None:
    is_there = compiled(FA2)
    found = [is_there()]
    with FileLock(specs["fa2"].lock_path):
        specs["fa2"].is_compiled = True
        found.append(is_there())
    found.append(is_there())
    assert found == [False, False, True]


def test_without_attention_kernels_flashinfer_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    compile_missing([])()
