"""Launched steps: their results on the way to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import StepResult
from minisgl.engine.logprobs import PendingLogprobs
from minisgl.engine.step_tensors import StepTensors


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step in progress on the device; implements core.PendingStep.

    It keeps references to the batch and to the packed buffer until the step is done. Tensors on the
    device need no such reference, because torch reuses their memory in the order of the stream.

    x       the step.
    host    int32 [2 or more, N] on the host, as Finish.put returns it. The first row has the first
            token of each request, and the second row has 1 for a request whose logits are finite.
            Or no row, if no request samples.
    copied  recorded after all copies to the host; None on a CPU, where they are done.
    """

    x: StepTensors
    host: Tensor
    copied: torch.cuda.Event | None
    logprobs: PendingLogprobs | None

    def done(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def failed_rows(self) -> set[int]:
        """Return the rows that sampled and got no token. Valid once the step is done."""
        order, batch = self.x.packed.order, self.x.batch
        flags = self.host.numpy()[1:2, : len(order)]
        failed = batch.samples[order] & (flags == 0).any(axis=0)
        return set(batch.rows[order][failed].tolist())

    def wait(self) -> StepResult:
        """Block until the step is done. Requests that do not sample get token 0, finite=True."""
        late = self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]
        if self.copied is not None:
            self.copied.synchronize()
        x, samples = self.x, self.x.batch.samples
        result = np.zeros((2, len(samples)), dtype=np.int32)
        host = self.host.numpy()[:2, : len(samples)]
        result[: len(host), x.packed.order] = host
        finite = (result[1] != 0) | ~samples
        tokens, counts = np.where(samples, result[:1], 0).T, samples.astype(np.int32)
        logprobs = prompts = None
        if self.logprobs is not None:
            logprobs, prompts = self.logprobs.read(x.places())
        return StepResult(
            tokens,
            counts,
            finite,
            logprobs,
            prompts,
            x.by_graph,
            ended_in_launch=self.copied is None,
            late=late,
        )


class LaunchedDrafts(LaunchedStep):
    """A step of an engine with drafts. The tokens are those that AcceptDrafts.put returns."""

    def wait(self) -> StepResult:
        result, batch = super().wait(), self.x.batch
        if not batch.drafting:  # a step of the warm-up
            return result
        rows = np.zeros((6 + self.x.columns.width, len(batch.rows)), dtype=np.int32)
        host = self.host.numpy()[:, : len(batch.rows)]
        rows[: len(host), self.x.packed.order] = host
        counts, agreed, drafted, predicted = rows[2:6]
        return result._replace(
            tokens=np.where(batch.samples, rows[6:], 0).T,
            counts=counts,
            drafted=drafted,
            agreed=agreed,
            predicted=predicted != 0,
        )
