"""Compiles the FlashInfer modules that attention needs, and logs the progress.

FlashInfer compiles a module when a wrapper first plans with it: about 14 s for fa2 and 77 s for fa3
on 16 cores, without any output. A starting engine therefore compiles its missing modules here
first. FlashInfer then finds them in its cache. The engine waits for the fa2 modules alone, and runs
prompts on them until the fa3 modules are compiled.

flashinfer is imported by the functions and not by this file: it is optional, and the environment
variables that it reads must be set before its import.
"""

import concurrent.futures
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout  # torch requires filelock

from minisgl.build.versions import prefill_generator

logger = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19  # of a process, as nice(1) counts

# A process with this program becomes ninja. When the thread that started it ends, Linux sends it
# SIGTERM, and ninja then ends the compilers. The first argument is the id of that thread's process.
_NINJA = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # otherwise the process has ended already
    os.execvp("ninja", ["ninja", *sys.argv[2:]])
"""

Build = concurrent.futures.Future[Any]


class AttentionKernel(NamedTuple):
    """One FlashInfer module: all batch prefill kernels of one variant, dtype and head size.

    Decode on tensor cores runs the same kernels. str() gives the name that the manifest of a kernel
    cache uses, such as "fa3 bfloat16 128" or "fa2 bfloat16 256 window soft_cap".

    variant   fa2, for every GPU, or fa3, for Hopper.
    dtype     of queries, keys, values and outputs.
    head_dim  elements of one head.
    window    whether the kernels mask the keys before a window.
    soft_cap  whether the kernels cap the scores.
    """

    variant: str
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    soft_cap: bool = False

    def __str__(self) -> str:
        words = [self.variant, str(self.dtype).removeprefix("torch."), str(self.head_dim)]
        words += [name for name in ("window", "soft_cap") if getattr(self, name)]
        return " ".join(words)


def jit_spec(kernel: AttentionKernel) -> Any:
    """FlashInfer's JitSpec of the module: its sources, its compiler flags and its cache folder.

    The arguments are those that FlashInfer's wrappers use for causal attention without positional
    encoding. The wrappers therefore find this module.
    """
    return prefill_generator(kernel.variant)(
        kernel.variant,
        kernel.dtype,  # queries
        kernel.dtype,  # keys and values
        kernel.dtype,  # outputs
        torch.int32,  # page indices
        kernel.head_dim,
        kernel.head_dim,
        0,  # no positional encoding
        kernel.window,
        kernel.soft_cap,
        False,  # scores are not reduced in float16
    )


def compile_missing(kernels: Iterable[AttentionKernel]) -> Callable[[], None]:
    """Start to compile the modules that FlashInfer does not find.

    FlashInfer looks in a package of compiled modules (flashinfer_jit_cache) and in its own cache
    folder. The compilers run in processes of their own, so the caller can load weights meanwhile.
    An fa3 module is late if `kernels` has the fa2 module for the same attention too: late modules
    compile in the background, after the others and with the lowest priority. The others compile in
    parallel.

    Returns a function that waits for all modules but the late ones. Call it before FlashInfer plans
    with a module that is not late. It raises RuntimeError, as FlashInfer does, when nvcc, the C++
    compiler or ninja is missing or fails. It also waits while another process compiles the same
    module.
    """
    wanted = list(kernels)
    missing = [kernel for kernel in wanted if not jit_spec(kernel).is_compiled]
    if not missing:
        return lambda: None
    late = [k for k in missing if k.variant == "fa3" and k._replace(variant="fa2") in wanted]
    first = [kernel for kernel in missing if kernel not in late]
    total = len(missing)
    numbered = list(enumerate(first + late, 1))
    for number, kernel in numbered:
        _announce(number, total, kernel)
    builds: list[Build] = []
    if first:
        threads = concurrent.futures.ThreadPoolExecutor(len(first), "compile")
        builds = [threads.submit(_build, number, total, k) for number, k in numbered[: len(first)]]
        threads.shutdown(wait=False)
    for number, kernel in numbered[len(first) :]:
        # The process may end while a daemon thread runs.
        arguments = (builds, number, total, kernel)
        threading.Thread(target=_build_late, args=arguments, name="compile", daemon=True).start()

    def wait() -> None:
        for build in builds:
            build.result()

    return wait


def compiled(kernel: AttentionKernel) -> Callable[[], bool]:
    """Return a function that tells whether FlashInfer can load the module at once.

    The function does not wait for a compiler that writes the module, in this process or another.
    """
    spec = jit_spec(kernel)
    found = False

    def is_there() -> bool:
        nonlocal found
        found = found or (spec.is_compiled and not _is_locked(spec))
        return found

    return is_there


def _is_locked(spec: Any) -> bool:
    """Whether a process builds the module now. FlashInfer holds this lock while it builds."""
    try:
        with FileLock(spec.lock_path, thread_local=False).acquire(blocking=False):
            return False
    except Timeout:
        return True


def compile_modules(kernels: Sequence[AttentionKernel]) -> list[Any]:
    """Compile the modules one by one, log a line before and after each, and return their JitSpecs.

    Raises RuntimeError when a compiler fails.
    """
    specs = []  # without kernels, FlashInfer need not be installed
    for number, kernel in enumerate(kernels, 1):
        _announce(number, len(kernels), kernel)
        specs.append(_build(number, len(kernels), kernel))
    return specs


def _announce(number: int, total: int, kernel: AttentionKernel) -> None:
    from flashinfer.jit import env

    logger.info(
        "compiling attention kernel %d of %d: FlashInfer %s cache=%s",
        number,
        total,
        kernel,
        env.FLASHINFER_JIT_DIR,
    )


def _build(number: int, total: int, kernel: AttentionKernel) -> Any:
    began_s = time.monotonic()
    spec = jit_spec(kernel)
    _run_ninja(spec)
    seconds = time.monotonic() - began_s
    logger.info("compiled attention kernel %d of %d s=%.0f", number, total, seconds)
    return spec


def _run_ninja(spec: Any) -> None:
    """Build the module as spec.build(verbose=False) does. The compilers end with this process.

    A compiler that outlived the process would write the module, and no process would hold the lock
    of the module. The next start would then load an incomplete module, or compile in the same
    folder at the same time. The compilers also end if the process is killed.
    """
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        spec.build(verbose=False)  # raises FlashInfer's error
    folder, jobs = spec.build_dir.resolve(), os.environ.get("MAX_JOBS", "")
    flags = ["-v", "-C", str(folder), "-f", str(spec.ninja_path.resolve())]
    flags += ["-j", jobs] if jobs.isdigit() else []
    command = [sys.executable, "-ISc", _NINJA, str(os.getpid()), *flags]
    with FileLock(spec.lock_path, thread_local=False):
        spec.write_ninja()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"Ninja build failed. Ninja output:\n{done.stdout}")


def _build_late(builds: Sequence[Build], number: int, total: int, kernel: AttentionKernel) -> None:
    concurrent.futures.wait(builds)
    # Linux keeps a priority for each thread, and the compilers inherit that of their thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    try:
        _build(number, total, kernel)
    except RuntimeError as error:
        logger.error("prompts stay on the fa2 kernels: %s did not compile: %s", kernel, error)
