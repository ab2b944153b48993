"""Log-probabilities of sampled tokens and of prompt tokens, computed in the same step.

Both kinds are computed from the model's logits, before any edit.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core.batch import Batch, HostLogprobs, Logprobs
from minisgl.engine.logits_processing import upload
from minisgl.kernel import top_logprobs
from minisgl.models.decoder import CausalLM

_PROMPT_ROWS = 256  # prompt positions computed at a time: logits take 150 MB for 150,000 ids


@dataclass(frozen=True, slots=True, eq=False)
class PendingLogprobs:
    """Log-probabilities that the device copies to the host. Valid when the step is complete.

    sampled   of the sampled tokens, in the order of StepInputs; None if no request asks for them.
    prompts   of prompt tokens, by the index of the request in the batch. Each entry is a list of
              the consecutive parts of the request's chunk.
    """

    sampled: Logprobs[Tensor] | None
    prompts: dict[int, list[Logprobs[Tensor]]]

    def read(self, places: NDArray[np.intp]) -> tuple[HostLogprobs | None, dict[int, HostLogprobs]]:
        """Return StepResult.logprobs and StepResult.prompt_logprobs.

        places: intp [B], the position of each request in the packed buffer (StepInputs.places).
        """
        sampled = None
        if self.sampled is not None:
            sampled = Logprobs(*(part.numpy()[places] for part in self.sampled))
        prompts = {
            index: Logprobs(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))
            for index, parts in self.prompts.items()
        }
        return sampled, prompts


def start_logprobs(
    model: CausalLM,
    batch: Batch,
    first_tokens: NDArray[np.intp],
    hidden: Tensor | None,
    logits: Tensor | None,
    next_tokens: Tensor | None,
) -> PendingLogprobs | None:
    """Queue the computation of the log-probabilities and their copies to the host.

    Returns None if batch.logprobs is None.

    first_tokens: [B], the index of the first token of each chunk among the rows of `hidden`.
    hidden: [T or more, H], hidden states after the final norm; None if no request asks for
    log-probabilities of its prompt.
    logits: float32 [N, V], before any edit. next_tokens: int32, row 0 the first
    tokens [N], from sampler.sample_tokens.
    Both are None if no request samples.
    """
    wanted, reqs = batch.logprobs, batch.num_reqs
    if wanted is None:
        return None
    sampled = None
    count = int(wanted.sampled.max(initial=-1))
    if count >= 0 and logits is not None and next_tokens is not None:
        sampled = _to_host(top_logprobs(logits[:reqs], next_tokens[0, :reqs], count))
    prompts: dict[int, list[Logprobs[Tensor]]] = {}
    if hidden is None:
        return PendingLogprobs(sampled, prompts)
    targets = upload({"targets": np.maximum(wanted.prompt_targets, 0)}, hidden.device)["targets"]
    head, asking = model.lm_head, np.flatnonzero(wanted.prompt >= 0)
    parts = torch.split(targets, batch.lengths[asking].tolist())
    for index, chosen in zip(asking.tolist(), parts, strict=True):
        positions = hidden[int(first_tokens[index]) :][: len(chosen)]
        pieces = (torch.split(part, _PROMPT_ROWS) for part in (positions, chosen))
        count = int(wanted.prompt[index])
        prompts[index] = [
            _to_host(top_logprobs(head.all_gather_logits(head.logits(rows)).float(), ids, count))
            for rows, ids in zip(*pieces, strict=True)
        ]
    return PendingLogprobs(sampled, prompts)


def _to_host(found: Logprobs[Tensor]) -> Logprobs[Tensor]:
    return Logprobs(*(part.to("cpu", non_blocking=True) for part in found))
