"""The engine: one tensor-parallel worker that runs the forward steps planned by the scheduler."""

from minisgl.engine.check import check_start
from minisgl.engine.engine import Engine
from minisgl.engine.extensions import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.memory import resolve_device
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.stages import Stage
from minisgl.engine.step_tensors import StepColumns, StepTensors

__all__ = [
    "DEFAULT_EXTENSIONS",
    "Engine",
    "Extensions",
    "ModelRunner",
    "Stage",
    "StepColumns",
    "StepTensors",
    "check_start",
    "resolve_device",
]
