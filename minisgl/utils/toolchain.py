"""Finds the compilers that Triton and FlashInfer call."""

import os
import shutil
from pathlib import Path


def find_c_compiler() -> str | None:
    """Path of the C compiler that Triton uses for kernel launchers; None when there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def find_nvcc() -> str | None:
    """Path of the CUDA compiler that FlashInfer uses; None when there is none."""
    default = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return shutil.which("nvcc") or (str(default) if default.exists() else None)
