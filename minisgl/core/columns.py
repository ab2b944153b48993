"""The columns that carry the sampling parameters of requests to the device.

A parameter that the sampler needs for each row of a step is one entry of `SAMPLING_COLUMNS`. That
list determines the columns of the request table, the packed buffer of a step, its padding and its
views on the device. A new parameter changes only the list, `SamplingParams`, the sampler and the
sampler's kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Column:
    """A sampling parameter with one value for each row of a step.

        Column("boost", np.float32, neutral=0, read=attrgetter("boost"))

    name     key of the column in Batch.sampling and in the views of the packed buffer.
    dtype    np.int32, np.float32 or np.int64.
    neutral  value of padding rows, and of all rows if the batch leaves the column out. It must
             cause the least work in the sampler (temperature 0: greedy).
    read     returns the value of this column for a request, from its SamplingParams.
    """

    name: str
    dtype: type[np.int32 | np.float32 | np.int64]
    neutral: float
    read: Callable[[Any], float]


SamplingArrays = Mapping[str, NDArray[Any]]  # arrays [B], by the name of the column

SAMPLING_COLUMNS: tuple[Column, ...] = (
    Column("temperature", np.float32, 0, attrgetter("temperature")),
    Column("top_k", np.int32, 0, lambda params: max(params.top_k, 0)),
    Column("top_p", np.float32, 1, attrgetter("top_p")),
    Column("min_p", np.float32, 0, attrgetter("min_p")),
    Column("seed", np.int64, 0, attrgetter("seed")),
)


def sampling_arrays(params: Sequence[SamplingParams]) -> SamplingArrays:
    """Return the columns of these requests, one value for each request. Every seed must be set."""
    return {
        column.name: np.array([column.read(one) for one in params], dtype=column.dtype)
        for column in SAMPLING_COLUMNS
    }
