"""A launched step: what is still under way on the device, and how to wait for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import StepResult
from minisgl.engine.extras import PendingLogprobs
from minisgl.engine.inputs import StepInputs
from minisgl.kernel import SampledTokens

__all__ = ["LaunchedStep"]


class LaunchedStep:
    """Result of one step, on its way to the host; implements core.PendingStep.

    Holds the step's inputs, so that no device memory of it is reused before it is done.
    """

    def __init__(
        self,
        num_reqs: int,
        inputs: StepInputs,
        sampled: SampledTokens | None,
        logprobs: PendingLogprobs | None = None,
    ) -> None:
        self._logprobs = logprobs
        self._num_reqs = num_reqs
        self._inputs = inputs
        self._host: Tensor | None = None
        self._done: torch.cuda.Event | None = None
        if sampled is not None:
            both = torch.stack((sampled.tokens, sampled.finite.int()))
            self._host = both.to("cpu", non_blocking=True)
        if inputs.positions.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> StepResult:
        """Block until the step is done. Tokens of reqs that did not sample are 0, and finite."""
        if self._done is not None:
            self._done.synchronize()
        tokens = np.zeros(self._num_reqs, dtype=np.int32)
        finite: NDArray[np.bool_] = np.ones(self._num_reqs, dtype=np.bool_)
        if self._host is not None:
            sampled = self._host.numpy()
            tokens[self._inputs.sampled_reqs] = sampled[0]
            finite[self._inputs.sampled_reqs] = sampled[1] != 0
        logprobs = None if self._logprobs is None else self._logprobs.read()
        return StepResult(tokens, finite, logprobs)
