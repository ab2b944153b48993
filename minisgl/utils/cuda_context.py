"""Opens the CUDA context of a GPU in a thread, while the process imports torch.

A context takes some tenths of a second to open. The import of torch takes seconds, and it does not
need the context. torch later uses the context of the device that exists in the process.
"""

import ctypes
import importlib.util
import os
import threading
from pathlib import Path

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


def open_context_early(device: str, index: int) -> threading.Thread | None:
    """Start to open the context of a GPU, and return the thread that does it.

    Returns None if the process will not use a GPU. The process keeps the context until it ends.

    device: the setting --device: auto, cpu or cuda. index: the number of the GPU, as torch counts.
    """
    if device not in ("auto", "cuda") or not _torch_uses_cuda():
        return None
    # The driver reads this variable when it starts. torch sets the same value when it starts the
    # driver.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_open, args=(index,), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _torch_uses_cuda() -> bool:
    """Whether the installed torch is a build for CUDA. Does not import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _open(index: int) -> None:
    """Open the context. A failure has no effect: torch makes the same calls and reports it."""
    try:
        driver = ctypes.CDLL(_DRIVER)  # releases the GIL during each call
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == _SUCCESS and (
        driver.cuDeviceGet(ctypes.byref(device), index) == _SUCCESS
    ):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
