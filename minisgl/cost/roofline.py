"""The first step cost of a server, before it has measured its steps."""

from collections.abc import Sequence
from math import log

import numpy as np

from minisgl.core import StepCost
from minisgl.core.step_cost import TimedStep
from minisgl.cost.floor import MEASURED_TP, Ceilings, Cost, operations_of_pairs, step_s
from minisgl.cost.gpus import GPUS
from minisgl.models.spec import ModelSpec

SIZES = (1, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 16_384, 32_768)
_ABOVE_FLOOR = 1.3  # kernels reach about three quarters of the rates
_HOST_S = 0.0003  # of each step


def roofline(
    model: ModelSpec, cost: Cost, tp: int, device: str, timed: Sequence[TimedStep], most: int
) -> StepCost:
    """Return an estimate of the step cost of an engine.

    cost: of the model on each of tp GPUs. device: the name of the GPU, or "cpu". timed: steps
    nearly without context in rising order of tokens: decode steps, then chunks. most: the tokens
    of the largest step.

    On a GPU with known rates a step takes 1.3 times its floor, and 0.3 ms of the host. A timed step
    that took longer than this gives a factor for its number of tokens. Between two of them the
    factor is interpolated, and outside of them it is that of the nearest. The launch by the host
    bounds short chunks of a small model. Decode steps in CUDA graphs and long chunks keep their own
    factors. A step with a chunk and no more tokens than the largest decode graph has the price of a
    decode step. On other devices the times are linear between the first and the last timed step,
    and the rates of keys and pairs follow from these two.
    """
    small, large = timed[0], timed[-1]
    sizes = [size for size in SIZES if size < most] + [most]
    pair_operations = sum(operations_of_pairs(model).values()) / tp
    ceilings = rates_of(device)
    # A prompt token moves no state, so states have a price of their own.
    state_bytes, cost = cost.state_bytes, cost._replace(state_bytes=0)
    if ceilings is None:
        # If there is one timed step, the rise is not known, and all steps begin with equal times.
        further = large.tokens - small.tokens
        rise_s = max(large.seconds - small.seconds, 0.0) / further if further else 0.0
        seconds = [small.seconds + max(size - small.tokens, 0) * rise_s for size in sizes]
        ceilings = Ceilings(
            bytes_per_s=cost.read_bytes(small.tokens) / small.seconds,
            operations_per_s=cost.operations * large.tokens / large.seconds,
        )
    else:
        # All-reduces over a number of GPUs that was not measured count as no time.
        known = cost if tp in MEASURED_TP else cost._replace(reduces=0)

        def estimate_s(tokens: int) -> float:
            return _ABOVE_FLOOR * step_s(known, tokens, 0, ceilings, tp) + _HOST_S

        factors = [max(step.seconds / estimate_s(step.tokens), 1.0) for step in timed]
        points = [log(step.tokens) for step in timed]
        found = np.interp(np.log(sizes), points, factors)
        seconds = [f * estimate_s(size) for f, size in zip(found.tolist(), sizes, strict=True)]
    return StepCost(
        tokens=tuple(sizes),
        seconds=tuple(np.maximum.accumulate(seconds).tolist()),
        per_decode_key_s=_ABOVE_FLOOR * cost.kv_bytes / ceilings.bytes_per_s,
        per_decode_req_s=_ABOVE_FLOOR * state_bytes / ceilings.bytes_per_s,
        per_prefill_pair_s=_ABOVE_FLOOR * pair_operations / ceilings.operations_per_s,
        per_draft_s=_ABOVE_FLOOR * cost.draft_bytes / ceilings.bytes_per_s,
    )


def rates_of(device: str) -> Ceilings | None:
    """Return the rates of a GPU by the name that CUDA gives it; None for an unknown device."""
    name = device.upper().replace(" ", "").replace("-", "")
    return next((gpu.ceilings for key, gpu in GPUS.items() if key in name), None)
