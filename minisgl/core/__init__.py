"""Types that several packages share: sampling parameters, batches, settings, errors.

Modules that need EditedReq, LogprobsRequest or Logprobs import them from core.batch. Nothing here
imports torch.
"""

from minisgl.core.batch import (
    Batch,
    EngineLike,
    Int32Array,
    PageUpdates,
    PendingStep,
    StepResult,
    WindowLayers,
)
from minisgl.core.config import EngineConfig, ModelFacts, SchedulerConfig, TokenizerInfo
from minisgl.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    GrammarFailed,
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
    SAMPLING_COLUMNS,
    Column,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from minisgl.core.step_cost import StepCost, step_sizes

__all__ = [
    "SAMPLING_COLUMNS",
    "Batch",
    "Cancelled",
    "Column",
    "ConfigError",
    "DeadlineExceeded",
    "EngineConfig",
    "EngineError",
    "EngineLike",
    "FinishReason",
    "Grammar",
    "GrammarFailed",
    "GrammarKind",
    "Int32Array",
    "InvalidRequest",
    "InvariantBroken",
    "MinisglError",
    "ModelFacts",
    "OutOfMemory",
    "Overloaded",
    "PageUpdates",
    "PendingStep",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "StepCost",
    "StepResult",
    "TokenizerInfo",
    "Unsupported",
    "WindowLayers",
    "WorkerDied",
    "step_sizes",
]
