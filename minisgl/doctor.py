"""`minisgl doctor`: checks of the machine, one line each, with the remedy where a check fails."""

import argparse
import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from huggingface_hub import constants

from minisgl.utils.host_memory import cpu_free_bytes
from minisgl.utils.toolchain import find_c_compiler, find_nvcc

_TIMEOUT_S = 3.0  # for the hub, and for nvidia-smi
_GIB = 2**30
_OK, _WARNING, _FAILED = "ok", "warning", "failed"
# FlashInfer, and its packages of compiled kernels. With them, a start compiles fewer kernels.
_FLASHINFER = ("flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin")


class Check(msgspec.Struct, frozen=True):
    """The result of one check.

    state   ok, warning or failed. After a failed check, a start may fail or not use the GPU.
    remedy  the advice to the user; "" if the state is ok.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def main(argv: Sequence[str]) -> int:
    """Print the checks. Returns 1 if a check has failed."""
    description = "Check this machine: one line for each check, with the remedy where it fails."
    parser = argparse.ArgumentParser(prog="minisgl doctor", description=description)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args(argv)
    checks = [_driver(), _torch(), _gpu(), _flashinfer(), _compilers(), _memory_lock()]
    kernels = os.environ.get("TRITON_CACHE_DIR") or "~/.triton"
    checks += [_host_memory(), _shared_memory(), _sockets()]
    checks += [_writable("model cache", constants.HF_HUB_CACHE, "HF_HOME")]
    checks += [_writable("kernel cache", kernels, "TRITON_CACHE_DIR"), _hub(constants.ENDPOINT)]
    if options.json:
        sys.stdout.write(msgspec.json.encode(checks).decode() + "\n")
    else:
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            sys.stdout.write(f"{check.state:8} {check.name:17} {check.found}{remedy}\n")
    return int(any(check.state == _FAILED for check in checks))


def _driver() -> Check:
    if (program := shutil.which("nvidia-smi")) is None:
        return Check(
            "driver", _WARNING, "nvidia-smi is not installed", "a GPU needs NVIDIA's driver"
        )
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("driver", _FAILED, f"nvidia-smi failed: {error}", "install the driver again")
    if done.returncode or not done.stdout.split():
        found = " ".join((done.stdout + done.stderr).split())[:200] or "nvidia-smi finds no GPU"
        return Check("driver", _FAILED, found, "load the driver's kernel module")
    return Check("driver", _OK, done.stdout.split()[0])


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing
        return Check("torch", _FAILED, str(error), "pip install 'torch>=2.11,<2.16'")
    return Check("torch", _OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")


def _gpu() -> Check:
    if not _has_gpu():
        if shutil.which("nvidia-smi") is None:
            return Check("GPU", _WARNING, "none", "the server runs on the CPU")
        remedy = "install a CUDA build of torch that fits the driver, or use --device cpu"
        return Check("GPU", _FAILED, "the driver is installed, but torch finds no GPU", remedy)
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(
        f"{gpu.name} ({gpu.total_memory / _GIB:.0f} GiB, {gpu.major}.{gpu.minor})"
        for gpu in devices
    )
    if devices[0].major < 8:
        return Check("GPU", _WARNING, found, "bfloat16 needs compute capability 8.0 or later")
    from minisgl.kernel.chips import RAN, chip_of

    chip = chip_of(10 * devices[0].major + devices[0].minor)
    if chip.state == RAN:
        return Check("GPU", _OK, found)
    remedy = "compare the answers with minisgl check; docs/support.md lists the GPUs that ran"
    return Check("GPU", _WARNING, f"{found}, {chip.state}", remedy)


def _flashinfer() -> Check:
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    found = ", ".join(f"{name} {installed[name]}" for name in _FLASHINFER if name in installed)
    if _FLASHINFER[0] not in installed and _has_gpu():
        remedy = "pip install 'minisgl[gpu]'; the attention of prompts is slow without it"
        return Check("FlashInfer", _WARNING, "not installed", remedy)
    return Check("FlashInfer", _OK, found or "not installed; only a GPU needs it")


def _compilers() -> Check:
    missing = [] if find_c_compiler() else ["C compiler"]
    missing += [] if find_nvcc() else ["nvcc"]
    missing += [] if shutil.which("ninja") else ["ninja"]
    found = " or ".join(missing)
    if not missing:
        return Check("compilers", _OK, f"{find_c_compiler()}, {find_nvcc()}")
    if not _has_gpu():
        return Check("compilers", _OK, f"no {found}, which only a GPU needs")
    remedy = "install them, or give --kernel-cache a folder that minisgl compile has filled"
    # Triton compiles the launcher of each kernel with the C compiler.
    state = _WARNING if find_c_compiler() or "MINISGL_KERNEL_CACHE" in os.environ else _FAILED
    return Check("compilers", state, f"no {found}", remedy)


def _memory_lock() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("memory lock", _OK, "unlimited")
    found = f"{limit / 2**20:.0f} MiB"
    if limit >= 8 * 2**20:
        return Check("memory lock", _OK, found)
    return Check("memory lock", _WARNING, found, "several GPUs may need ulimit -l unlimited")


def _host_memory() -> Check:
    free = f"{cpu_free_bytes() / 1e9:.0f} GB free for --host-cache-gb"
    if (program := shutil.which("nvidia-smi")) is None:
        return Check("host memory", _OK, free)
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    command = [program, query, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("host memory", _WARNING, f"{free}, nvidia-smi failed: {error}", "see driver")
    links = [" x".join(line.split(", ")) for line in done.stdout.splitlines()]
    return Check("host memory", _OK, f"{free}, PCIe {', '.join(links) or 'unknown'}")


def _shared_memory() -> Check:
    try:
        room = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return Check("shared memory", _WARNING, str(error), "several GPUs need /dev/shm")
    found = f"/dev/shm has {room / _GIB:.1f} GiB"
    if room >= _GIB:
        return Check("shared memory", _OK, found)
    return Check("shared memory", _WARNING, found, "several GPUs need 1 GiB; Docker: --shm-size=1g")


def _sockets() -> Check:
    try:
        with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
            return Check("socket folder", _OK, str(Path(folder).parent))
    except OSError as error:
        return Check("socket folder", _FAILED, str(error), "mount a writable /tmp or set TMPDIR")


def _hub(address: str) -> Check:
    if constants.HF_HUB_OFFLINE:
        return Check("hub", _OK, "switched off by HF_HUB_OFFLINE")
    faults = [f"no answer within {_TIMEOUT_S:g} s"]

    def ask() -> None:
        try:
            httpx.head(address, timeout=_TIMEOUT_S)
            faults.clear()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            faults[:] = [str(error)]

    # httpx.head cannot limit the DNS look-up, so a thread with a limit makes the request.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if faults:
        remedy = "the server can load only models that are on this machine"
        return Check("hub", _WARNING, f"{address} is not reachable: {faults[0]}", remedy)
    return Check("hub", _OK, f"{address} answers")


def _writable(name: str, path: str, variable: str) -> Check:
    """Check that this user can write to a folder, or can create it."""
    folder = Path(path).expanduser()
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / _GIB
    except OSError as error:
        remedy = f"set {variable} to a folder that this user can write to"
        return Check(name, _FAILED, f"{folder}: {error.strerror}", remedy)
    return Check(name, _OK, f"{folder} ({free:.0f} GiB free)")


def _has_gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()
