"""The memory and the rates of GPUs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from minisgl.core import ConfigError
from minisgl.cost.floor import Ceilings
from minisgl.utils import near_names


class Gpu(NamedTuple):
    """One kind of GPU.

    memory_bytes  the total that CUDA reports, without other processes.
    ceilings      the rates; None for a GPU that is given by its memory alone.
    measured      True: the rates were measured. False: they come from the data sheet, and no
                  program reaches them.
    copies        True: attention of long prompts copies contexts (kernel/contexts.py). Hopper does
                  this.
    """

    name: str
    memory_bytes: int
    ceilings: Ceilings | None = None
    measured: bool = False
    copies: bool = False


def _gpu(name: str, gib: float, tb_s: float, tflops: float, copies: bool = False) -> Gpu:
    return Gpu(name, int(gib * 2**30), Ceilings(tb_s * 1e12, tflops * 1e12), copies=copies)


# Bandwidth and dense bf16 rate come from the data sheets. H100 and A100 are SXM models of 80 GB.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "H200": Gpu("H200", 143_156 * 2**20, Ceilings(), measured=True, copies=True),
        "H100": _gpu("H100", 79.1, 3.35, 989, copies=True),
        "A100": _gpu("A100", 79.2, 2.04, 312),
        "L40S": _gpu("L40S", 44.4, 0.864, 362),
        "RTX4090": _gpu("RTX4090", 23.6, 1.008, 165),
    }
)


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, or a GPU with this number of bytes. Raises ConfigError."""
    name = text.upper().replace(" ", "").replace("-", "")
    if name in GPUS:
        return GPUS[name]
    try:
        memory = int(float(text))
    except (ValueError, OverflowError):
        memory = 0
    if memory < 2**30:
        raise ConfigError(
            f"--gpu {text} is neither a known GPU nor a number of bytes of at least 1 GiB; "
            f"known: {', '.join(GPUS)}{near_names(name, GPUS)}"
        )
    return Gpu(f"{memory / 2**30:.1f} GiB", memory)
