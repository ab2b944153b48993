"""Types that several packages share: sampling parameters, batches, settings, errors.

Modules that need EditedReq, LogprobsRequest or Logprobs import them from core.batch. Nothing here
imports torch.

The names from core.batch and core.columns are imported at their first use, since they need numpy.
The launcher needs neither, and starts the scheduler sooner without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minisgl.core.config import EngineConfig, ModelFacts, SchedulerConfig, TokenizerInfo
from minisgl.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineFailure,
    GrammarFailed,
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

if TYPE_CHECKING:
    from minisgl.core.batch import (
        Batch,
        EngineLike,
        Int32Array,
        PageUpdates,
        PendingStep,
        StateCopies,
        StepResult,
        WindowLayers,
    )
    from minisgl.core.columns import SAMPLING_COLUMNS, Column

__all__ = [
    "FREE_STEPS",
    "SAMPLING_COLUMNS",
    "Batch",
    "Cancelled",
    "Column",
    "ConfigError",
    "DeadlineExceeded",
    "EngineConfig",
    "EngineError",
    "EngineFailure",
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
    "ModelNotFound",
    "OutOfMemory",
    "Overloaded",
    "PageUpdates",
    "PendingStep",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "StateCopies",
    "StepCost",
    "StepResult",
    "StepWork",
    "TokenizerInfo",
    "Unsupported",
    "WindowLayers",
    "WorkerDied",
    "step_sizes",
]


def __getattr__(name: str) -> Any:
    """Import a name from core.batch or core.columns at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    columns = name in ("SAMPLING_COLUMNS", "Column")
    return getattr(import_module("minisgl.core.columns" if columns else "minisgl.core.batch"), name)
