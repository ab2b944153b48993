"""Types that several packages share: sampling parameters, batches, settings, errors.

Nothing here imports torch. This file has no name from core.batch, core.columns and core.rows, which
need numpy. The launcher does not need them, and starts the scheduler sooner without numpy.
"""

from minisgl.core.config import EngineConfig, ModelFacts, SchedulerConfig, TokenizerInfo
from minisgl.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineFailure,
    GrammarFailed,
    ImageRefused,
    InvalidRequest,
    InvariantBroken,
    MinisglError,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unsupported,
    WorkerDied,
)
from minisgl.core.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from minisgl.core.step_cost import FREE_STEPS, StepCost, StepWork, step_sizes

__all__ = [
    "FREE_STEPS",
    "Cancelled",
    "ConfigError",
    "DeadlineExceeded",
    "EngineConfig",
    "EngineError",
    "EngineFailure",
    "FinishReason",
    "Grammar",
    "GrammarFailed",
    "GrammarKind",
    "ImageRefused",
    "InvalidRequest",
    "InvariantBroken",
    "MinisglError",
    "ModelFacts",
    "ModelNotFound",
    "OutOfMemory",
    "Overloaded",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "StepCost",
    "StepWork",
    "TokenizerInfo",
    "Unsupported",
    "WorkerDied",
    "step_sizes",
]
