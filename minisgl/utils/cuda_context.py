"""Opens the context of a GPU in a thread, while the process imports torch.

A context takes some tenths of a second to open. The import of torch takes seconds and does not need
the context. torch later uses this context, because it is the primary context of the device.
"""

import ctypes
import importlib.util
import os
import threading
from pathlib import Path

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


def open_context_early(device: str, index: int) -> threading.Thread | None:
    """Start a thread that opens the context of a GPU, and return the thread.

    Returns None if `device` is cpu, if torch is not a build for CUDA, or without a driver. The
    process keeps the context until it ends.

    device: the value of --device: auto, cpu or cuda. index: the number of the GPU, as torch counts.
    """
    if device not in ("auto", "cuda") or not _torch_uses_cuda():
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)  # releases the GIL during each call
    except OSError:
        return None
    # The driver reads this variable in cuInit. torch sets the same value before it calls cuInit.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_open, args=(driver, index), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _torch_uses_cuda() -> bool:
    """Whether the installed torch is a build for CUDA. Does not import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _open(driver: ctypes.CDLL, index: int) -> None:
    """Open the context. Ignores failures: torch makes the same calls and reports the failure."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == _SUCCESS and (
        driver.cuDeviceGet(ctypes.byref(device), index) == _SUCCESS
    ):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
