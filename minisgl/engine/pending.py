"""A launched step: what is still under way on the device, and how to wait for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import Batch, StepResult
from minisgl.engine.inputs import StepInputs
from minisgl.engine.logits_processing import PendingLogprobs


class LaunchedStep:
    """Result of one step, on its way to the host; implements core.PendingStep.

    Holds the batch and what was packed from it until the step is done (device memory needs no
    holding: torch hands it out again in the order of the stream).
    """

    def __init__(
        self,
        batch: Batch,
        inputs: StepInputs,
        chosen: Tensor | None,
        logprobs: PendingLogprobs | None = None,
        by_graph: bool = False,
    ) -> None:
        """chosen: int32 [2, N or more] as DeviceState.choose, in the inputs' order; None when
        nobody samples. Queues its copy on the current stream."""
        self._batch = batch
        self._inputs = inputs
        self._logprobs = logprobs
        self._by_graph = by_graph
        self._host: Tensor | None = None
        if chosen is not None:
            self._host = chosen.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if inputs.packed.is_pinned():
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def done(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> StepResult:
        """Block until the step is done. Tokens of reqs that did not sample are 0, and finite."""
        if self._done is not None:
            self._done.synchronize()
        reqs = self._batch.num_reqs
        tokens = np.zeros(reqs, dtype=np.int32)
        finite: NDArray[np.bool_] = np.ones(reqs, dtype=np.bool_)
        if self._host is not None:
            chosen = self._host.numpy()[:, :reqs]
            tokens[self._inputs.order] = chosen[0]
            finite[self._inputs.order] = chosen[1] != 0
            tokens[~self._batch.samples] = 0
            finite |= ~self._batch.samples
        logprobs = None if self._logprobs is None else self._logprobs.read()
        return StepResult(tokens, finite, logprobs, self._by_graph)
