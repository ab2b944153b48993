"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it still runs.

Between two kernels of a CUDA graph the GPU reads nothing for about 1 us. A kernel launched with
launch_pdl starts when every program of the kernel before has ended or has called
gdc_launch_dependents. Its gdc_wait blocks until the kernel before is complete and its writes are
visible.

I1  Every program of a kernel with PDL calls gdc_wait. Code after gdc_wait therefore runs after all
    earlier kernels, and not only after the last one.
I2  Before gdc_wait a kernel writes nothing. It reads parameters of the model. Attention
    (FlashInfer's too) also reads the tensors that describe the step. The last product of a few
    tokens' experts (`_down` in moe_few.py, mxfp4_few.py, fp8_few.py and int4_few.py) also reads
    their routing, or in the last two their logits. `_down` in moe_few.py, fp8_few.py and
    int4_few.py also reads the residual stream to which it adds. The kernel before it waits first,
    and then lets it start, so both are complete. Both products of packed_blocks.py read the blocks
    of tokens. The kernel before the first of these products is launched without PDL, so the blocks
    are complete. In a step without chunks, `_apply` in ssd_step.py also reads the states of the
    requests, which no other kernel writes then. `_apply` in delta_step.py reads those that do not
    move; `_inputs` writes the others. No kernel reads anything else.
I3  The tensors that describe a step are written before its stage_tokens, which is launched without
    PDL. They are therefore complete and visible before any kernel after stage_tokens starts.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import lru_cache

from triton import knobs
from triton.runtime import driver

from minisgl.kernel.chips import HOPPER, Chip, chip_of


def overlaps() -> bool:
    """Whether kernels use PDL: on Hopper and later GPUs, or when compiled for them."""
    return not knobs.runtime.interpret and _chip(driver.active).overlaps


def is_hopper() -> bool:
    """Whether the GPU, or the GPU that kernels are compiled for, has compute capability 9.0."""
    return not knobs.runtime.interpret and _chip(driver.active).arch == HOPPER


def has_large_tiles() -> bool:
    """Whether a program may have 227 KiB of shared memory: see kernel/chips.py."""
    return not knobs.runtime.interpret and _chip(driver.active).has_large_tiles


def shared_bytes() -> int:
    """The most shared memory of one program; Hopper's in Triton's interpreter."""
    chip = chip_of(HOPPER) if knobs.runtime.interpret else _chip(driver.active)
    return chip.shared_bytes


def converts_fp8() -> bool:
    """Whether the GPU converts e4m3 to float16 by an instruction."""
    return not knobs.runtime.interpret and _chip(driver.active).converts_fp8


def current_device() -> int | None:
    """The number of the current GPU; under `minisgl compile` the architecture to compile for.

    None in Triton's interpreter.
    """
    return None if knobs.runtime.interpret else driver.active.get_current_device()


@lru_cache(maxsize=4)
def _chip(active: object) -> Chip:
    target = active.get_current_target()  # type: ignore[attr-defined]
    return chip_of(int(target.arch))
