"""The uncommon part of a step: edited logits and log-probabilities, launched beside the rest."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, LogitEdits, PromptLogprobs, StepExtras, StepLogprobs
from minisgl.engine.inputs import StepInputs, upload
from minisgl.kernel import EditTensors, TopLogprobs, edit_logits, top_logprobs
from minisgl.models import CausalLM

# Logits of so many prompt positions at a time: 150 MB at a vocabulary of 150,000.
_PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class PendingLogprobs:
    """Log-probabilities of a step, copied to the host without waiting; read after the step.

    prompts: of the chunk at each position in the batch that asks, in parts.
    """

    num_reqs: int
    order: "np.ndarray[tuple[int], np.dtype[np.intp]]"
    sampled: TopLogprobs | None
    prompts: dict[int, list[TopLogprobs]]

    def read(self) -> StepLogprobs:
        """The host arrays; the step must have completed."""
        width = 0 if self.sampled is None else self.sampled.ids.shape[1]
        chosen = np.zeros(self.num_reqs, dtype=np.float32)
        ids = np.zeros((self.num_reqs, width), dtype=np.int32)
        values = np.zeros((self.num_reqs, width), dtype=np.float32)
        if self.sampled is not None:
            chosen[self.order] = self.sampled.chosen.numpy()
            ids[self.order] = self.sampled.ids.numpy()
            values[self.order] = self.sampled.values.numpy()
        prompt = {
            index: PromptLogprobs(
                *(np.concatenate([part[i].numpy() for part in parts]) for i in range(3))
            )
            for index, parts in self.prompts.items()
        }
        return StepLogprobs(chosen, ids, values, prompt)


def apply_history(extras: StepExtras, token_pool: Tensor) -> None:
    """Write ids that never pass through this engine into the token pool, for the penalties."""
    edits = extras.edits
    if edits is None or not len(edits.history_ids):
        return
    sent = upload(
        {"rows": edits.history_rows, "cols": edits.history_cols, "ids": edits.history_ids},
        token_pool.device,
    )
    token_pool[sent["rows"].long(), sent["cols"].long()] = sent["ids"]


def edited(logits: Tensor, batch: Batch, inputs: StepInputs, token_pool: Tensor) -> Tensor:
    """The logits to sample from: float32 [B, V], a copy when some req edits them."""
    extras = batch.extras
    if extras is None or extras.edits is None:
        return logits
    tensors = _edit_tensors(extras.edits, batch, inputs, logits.device)
    return edit_logits(logits, tensors, token_pool)


def _edit_tensors(
    edits: LogitEdits, batch: Batch, inputs: StepInputs, device: torch.device
) -> EditTensors:
    """Positions in the batch become rows of the logits."""
    position = (batch.start + batch.lengths)[edits.index]
    places = inputs.places.astype(np.int32)
    sent = upload(
        {
            "index": places[edits.index],
            "rows": batch.rows[edits.index],
            "position": position,
            "prompt_len": edits.prompt_len,
            "frequency": edits.frequency,
            "presence": edits.presence,
            "repetition": edits.repetition,
            "bias_index": places[edits.bias_index],
            "bias_ids": edits.bias_ids,
            "bias_values": edits.bias_values,
        },
        device,
    )
    return EditTensors(**sent, longest=int(position.max(initial=0)))


def start_logprobs(
    model: CausalLM,
    hidden: Tensor | None,
    logits: Tensor | None,
    tokens: Tensor | None,
    batch: Batch,
    inputs: StepInputs,
) -> PendingLogprobs | None:
    """Launch what batch.extras asks for.

    hidden: [T or more, H] where it asks for log-probabilities of prompts. logits, tokens: the
    unedited float32 [B, V] and what was sampled from them, in the inputs' order.
    """
    extras = batch.extras
    if extras is None:
        return None
    sampled = None
    most = int(extras.logprobs.max(initial=-1))
    if most >= 0 and logits is not None and tokens is not None:
        sampled = _to_host(top_logprobs(logits, tokens, most))
    prompts = {} if hidden is None else _start_prompts(model, hidden, batch, extras)
    if sampled is None and not prompts:
        return None
    return PendingLogprobs(batch.num_reqs, inputs.order, sampled, prompts)


def _start_prompts(
    model: CausalLM, hidden: Tensor, batch: Batch, extras: StepExtras
) -> dict[int, list[TopLogprobs]]:
    pending: dict[int, list[TopLogprobs]] = {}
    first_token = np.cumsum(batch.lengths) - batch.lengths
    taken = 0
    for index in np.flatnonzero(extras.prompt_logprobs >= 0).tolist():
        begin, length = int(first_token[index]), int(batch.lengths[index])
        count = int(extras.prompt_logprobs[index])
        targets = extras.prompt_targets[taken : taken + length]
        taken += length
        on_device = upload({"targets": np.maximum(targets, 0)}, hidden.device)["targets"]
        pending[index] = []
        for offset in range(0, length, _PROMPT_ROWS):
            rows = slice(begin + offset, begin + min(offset + _PROMPT_ROWS, length))
            chosen = on_device[offset : offset + _PROMPT_ROWS]
            logits = model.lm_head.all_gather_logits(model.lm_head.logits(hidden[rows])).float()
            pending[index].append(_to_host(top_logprobs(logits, chosen, count)))
    return pending


def _to_host(found: TopLogprobs) -> TopLogprobs:
    return TopLogprobs(*(part.to("cpu", non_blocking=True) for part in found))
