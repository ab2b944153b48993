"""The outputs of requests that a benchmark sends to an engine in its own process."""

from collections.abc import Sequence

from minisgl.benchmark.client import Answer
from minisgl.core import ConfigError
from minisgl.message.messages import StepOutput


def workload_error(message: str) -> ConfigError:
    """Return the error of a benchmark whose request failed with this message."""
    return ConfigError(f"this model cannot run the workload: {message}")


def record_step(answers: Sequence[Answer], output: StepOutput, now_s: float) -> None:
    """Add a step that ended at `now_s` to the answers. A uid is the index of its answer."""
    for done in output.prefill_done:
        answers[done.uid].cached_tokens = done.cached_tokens
    for uid in output.uids:
        answers[uid].outputs_s.append(now_s)
        answers[uid].output_tokens += 1
    for finished in output.finished:
        answers[finished.uid].error = finished.error
