"""The memory and the rates of GPUs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from minisgl.core import ConfigError
from minisgl.cost.floor import Ceilings
from minisgl.kernel.chips import HOPPER, chip_of
from minisgl.utils import near_names


class Gpu(NamedTuple):
    """One kind of GPU.

    memory_bytes  the total that CUDA reports, without other processes.
    ceilings      the rates; None for a GPU that is given by its memory alone.
    measured      True: the rates were measured. False: they come from the data sheet, and no
                  program reaches them.
    copies        True: attention of long prompts copies contexts (kernel/contexts.py). Hopper does
                  this.
    arch          90 for compute capability 9.0; None for a GPU that is given by its memory alone.
    """

    name: str
    memory_bytes: int
    ceilings: Ceilings | None = None
    measured: bool = False
    copies: bool = False
    arch: int | None = None

    @property
    def state(self) -> str | None:
        """Whether minisgl ran on such a GPU, as a phrase; None for a GPU without a name."""
        return None if self.arch is None else chip_of(self.arch).state


def _gpu(name: str, arch: int, gib: float, tb_s: float, tflops: float) -> Gpu:
    ceilings = Ceilings(tb_s * 1e12, tflops * 1e12)
    return Gpu(name, int(gib * 2**30), ceilings, copies=arch == HOPPER, arch=arch)


# Bandwidth and dense bf16 rate, with sums in float32, come from the data sheets. H100 and A100 are
# SXM models of 80 GB. The memory of a GB10 is also the memory of its CPU.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "H200": Gpu("H200", 143_156 * 2**20, Ceilings(), measured=True, copies=True, arch=HOPPER),
        "H100": _gpu("H100", 90, 79.1, 3.35, 989),
        "B300": _gpu("B300", 103, 268.0, 8.0, 2250),
        "B200": _gpu("B200", 100, 178.3, 8.0, 2250),
        "GB10": _gpu("GB10", 121, 119.6, 0.273, 125),
        "RTXPRO6000": _gpu("RTXPRO6000", 120, 94.9, 1.792, 504),
        "RTX5090": _gpu("RTX5090", 120, 31.3, 1.792, 209),
        "A100": _gpu("A100", 80, 79.2, 2.04, 312),
        "L40S": _gpu("L40S", 89, 44.4, 0.864, 362),
        "RTX4090": _gpu("RTX4090", 89, 23.6, 1.008, 165),
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
