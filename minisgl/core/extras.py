"""What only some requests ask for: edited logits and log-probabilities. No torch in here."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Changes to the logits of a step before a token is chosen.

    index                 int32 [E]; positions in the batch of the sampling reqs with penalties.
    frequency, presence   float32 [E]; subtracted per occurrence, or once, of an output token.
    repetition            float32 [E]; divides positive and multiplies negative logits of tokens
                          in prompt or output (Keskar et al., CTRL, 2019, section 4.1).
    prompt_len            int32 [E]; output starts at this position of the token pool's line.
    bias_index, bias_ids  int32 [N]; position in the batch, and whose logit grows by
    bias_values           float32 [N].
    history_*             int32 [H]; token_pool[rows, cols] = ids, applied before the forward: ids
                          that came from the prefix cache never pass through the engine otherwise.
    """

    index: Int32Array
    frequency: Float32Array
    presence: Float32Array
    repetition: Float32Array
    prompt_len: Int32Array
    bias_index: Int32Array
    bias_ids: Int32Array
    bias_values: Float32Array
    history_rows: Int32Array
    history_cols: Int32Array
    history_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class StepExtras:
    """Beside the Batch of a step in which some req asks for more than a token.

    edits            None when no req has any.
    logprobs         int32 [B]; how many most likely tokens to report with the sampled one,
                     -1: report nothing.
    prompt_logprobs  int32 [B]; the same for each prompt token of a chunk, -1: none.
    prompt_targets   int32 [sum of the lengths of those chunks]; the prompt token after each
                     position, -1 behind the prompt's end.
    """

    edits: LogitEdits | None
    logprobs: Int32Array
    prompt_logprobs: Int32Array
    prompt_targets: Int32Array


class PromptLogprobs(NamedTuple):
    """Of a chunk of n positions: target float32 [n], top_ids int32 and top float32 [n, K]."""

    target: Float32Array
    top_ids: Int32Array
    top: Float32Array


class StepLogprobs(NamedTuple):
    """Of the unedited logits: sampled float32 [B]; top_ids int32 and top float32 [B, K], most
    likely first; meaningful where the req asked. prompt: by position in the batch."""

    sampled: Float32Array
    top_ids: Int32Array
    top: Float32Array
    prompt: dict[int, PromptLogprobs]
