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
from minisgl.engine.step_tensors import Logits, StepTensors
from minisgl.kernel.logits import top_logprobs
from minisgl.models.decoder import CausalLM

_PROMPT_ROWS = 256  # prompt positions computed at a time: logits take 150 MB for 150,000 ids


@dataclass(frozen=True, slots=True, eq=False)
class PendingLogprobs:
    """Log-probabilities that the device copies to the host. Valid when the step is complete.

    sampled   of the sampled tokens, in the order of PackedBatch; None if no request asks for them.
    prompts   of prompt tokens, by the index of the request in the batch. Each entry is a list of
              the consecutive parts of the request's chunk.
    """

    sampled: Logprobs[Tensor] | None
    prompts: dict[int, list[Logprobs[Tensor]]]

    def read(self, places: NDArray[np.intp]) -> tuple[HostLogprobs | None, dict[int, HostLogprobs]]:
        """Return StepResult.logprobs and StepResult.prompt_logprobs.

        places: intp [B], the position of each request in the packed buffer (StepTensors.places).
        """
        sampled = None
        if self.sampled is not None:
            sampled = Logprobs(*(part.numpy()[places] for part in self.sampled))
        prompts = {
            index: Logprobs(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))
            for index, parts in self.prompts.items()
        }
        return sampled, prompts


def reports_prompts(batch: Batch) -> bool:
    """Return whether a request of the step asks for log-probabilities of its prompt."""
    return any(wanted.prompt >= 0 for wanted in batch.logprobs)


def start_logprobs(
    model: CausalLM, x: StepTensors, out: Logits, tokens: Tensor
) -> PendingLogprobs | None:
    """Queue the computation of the log-probabilities and their copies to the host.

    Returns None if no request asks for them. tokens: int32, as Finish.put returns it.
    """
    wanted, hidden, reqs = x.batch.logprobs, out.hidden, len(x.batch.rows)
    if not wanted:
        return None
    sampled = None
    count = max(one.sampled for one in wanted)
    if count >= 0 and out.full is not None:
        first = out.full if x.columns.width == 1 else out.full[x.columns.first_logits().long()]
        sampled = _to_host(top_logprobs(first[:reqs], tokens[0, :reqs], count))
    prompts: dict[int, list[Logprobs[Tensor]]] = {}
    head, asking = model.lm_head, [one for one in wanted if one.prompt >= 0]
    if hidden is None or not asking:
        return PendingLogprobs(sampled, prompts)
    ids = np.maximum(np.concatenate([one.targets for one in asking]), 0)
    targets = upload({"targets": ids}, hidden.device)["targets"]
    first_tokens = np.cumsum(x.packed.lengths) - x.packed.lengths
    parts = torch.split(targets, [len(one.targets) for one in asking])
    for one, chosen in zip(asking, parts, strict=True):
        positions = hidden[int(first_tokens[one.index]) :][: len(chosen)]
        pieces = (torch.split(part, _PROMPT_ROWS) for part in (positions, chosen))
        prompts[one.index] = [
            _to_host(
                top_logprobs(head.all_gather_logits(head.logits(rows)).float(), ids, one.prompt)
            )
            for rows, ids in zip(*pieces, strict=True)
        ]
    return PendingLogprobs(sampled, prompts)


def _to_host(found: Logprobs[Tensor]) -> Logprobs[Tensor]:
    return Logprobs(*(part.to("cpu", non_blocking=True) for part in found))
