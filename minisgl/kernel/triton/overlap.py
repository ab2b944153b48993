"""Programmatic dependent launch: a kernel is launched while the one before it still runs.

Every boundary of two kernels inside a graph costs about 1 us, in which nothing is read. A kernel
launched with launch_pdl starts when all programs of the one before have ended or called
gdc_launch_dependents, and gdc_wait holds it until that one is complete and its writes are seen.

I1  Every program of such a kernel calls gdc_wait. So what has passed it comes after all kernels
    before, not only after the last.
I2  Before gdc_wait it writes nothing, and reads nothing but parameters of the model and, in
    attention (FlashInfer's too), what describes the step.
I3  What describes a step is written before its stage_tokens, which is launched without this: so it
    is complete, and seen, before any kernel behind that one starts.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import lru_cache

from triton import knobs
from triton.runtime import driver


def overlaps() -> bool:
    """Whether kernels are launched so: on Hopper and later, or when compiled for those."""
    return not knobs.runtime.interpret and _arch(driver.active) >= 90


def is_hopper() -> bool:
    """Whether kernels run on compute capability 9.0, or are compiled for it."""
    return not knobs.runtime.interpret and _arch(driver.active) == 90


@lru_cache(maxsize=4)
def _arch(active: object) -> int:
    target = active.get_current_target()  # type: ignore[attr-defined]
    return int(target.arch)
