"""The words of the domain: requests, batches, settings, errors. Nothing here loads torch."""

from minisgl.core.batch import Batch, EngineLike, PendingStep, SamplingArrays, StepResult
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
from minisgl.core.extras import Int32Array, LogitEdits, PromptLogprobs, StepExtras, StepLogprobs
from minisgl.core.sampling import MAX_SEED, FinishReason, SamplingParams
from minisgl.core.step_cost import StepCost, step_sizes

__all__ = [
    "MAX_SEED",
    "Batch",
    "Cancelled",
    "ConfigError",
    "DeadlineExceeded",
    "EngineConfig",
    "EngineError",
    "EngineLike",
    "FinishReason",
    "Int32Array",
    "InvalidRequest",
    "InvariantBroken",
    "LogitEdits",
    "MinisglError",
    "ModelFacts",
    "OutOfMemory",
    "Overloaded",
    "PendingStep",
    "PromptLogprobs",
    "PromptTooLong",
    "RequestError",
    "SamplingArrays",
    "SamplingParams",
    "SchedulerConfig",
    "StepCost",
    "StepExtras",
    "StepLogprobs",
    "StepResult",
    "Unsupported",
    "WorkerDied",
    "step_sizes",
]
