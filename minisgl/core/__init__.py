"""Types that several packages share: sampling parameters, batches, settings, errors.

Nothing here imports torch.
"""

from minisgl.core.batch import (
    Batch,
    EditedReq,
    EngineLike,
    HostLogprobs,
    Int32Array,
    Logprobs,
    LogprobsRequest,
    PageUpdates,
    PendingStep,
    StepResult,
)
from minisgl.core.config import EngineConfig, ModelFacts, SchedulerConfig
from minisgl.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    InvariantBroken,
    MinisglError,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unsupported,
    WorkerDied,
)
from minisgl.core.sampling import (
    MAX_SEED,
    SAMPLING_COLUMNS,
    Column,
    FinishReason,
    SamplingArrays,
    SamplingParams,
    sampling_arrays,
)
from minisgl.core.step_cost import StepCost, step_sizes

__all__ = [
    "MAX_SEED",
    "SAMPLING_COLUMNS",
    "Batch",
    "Cancelled",
    "Column",
    "ConfigError",
    "DeadlineExceeded",
    "EditedReq",
    "EngineConfig",
    "EngineError",
    "EngineLike",
    "FinishReason",
    "HostLogprobs",
    "Int32Array",
    "InvalidRequest",
    "InvariantBroken",
    "Logprobs",
    "LogprobsRequest",
    "MinisglError",
    "ModelFacts",
    "OutOfMemory",
    "Overloaded",
    "PageUpdates",
    "PendingStep",
    "PromptTooLong",
    "RequestError",
    "SamplingArrays",
    "SamplingParams",
    "SchedulerConfig",
    "StepCost",
    "StepResult",
    "Unsupported",
    "WorkerDied",
    "sampling_arrays",
    "step_sizes",
]
