"""Logits processors: edits of a request's logits before its next token is sampled.

The engine skips this work if no request of the step has edited logits. Otherwise it collects the
edits of the processors before it queues the forward. Between the forward and the sampler it applies
them to a float32 copy of the logits of all ids, in the order of `Extensions.logits_processors`.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import RequestError, SamplingParams
from minisgl.core.batch import Batch, EditedReq, Int32Array
from minisgl.engine.model_runner import DraftTensors, ModelRunner
from minisgl.engine.step_tensors import StepTensors
from minisgl.kernel.dispatch import apply_token_mask
from minisgl.kernel.logits import PenaltyTensors, add_bias, apply_penalties
from minisgl.kernel.step import StepViews

State = TypeVar("State")
Edit = Callable[[Tensor], None]  # changes float32 [N, V] logits in place

_ALIGNMENT = 8  # bytes of the widest element that `upload` sends, an int64
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class ProcessingStep:
    """The step whose logits are to be edited.

    batch          the whole step, on the host.
    places         intp [B]; for each request of the batch, the position of its logits among the N
                   rows of logits. The columns in `views` have the same order. A step with drafts
                   has several rows of logits for a decode request: see DraftStep.token_views.
    views          the batch's columns on the device, such as views.sampling[name], [N].
    token_pool     int32 [rows, max_seq_len + 1] on the device; (batch.rows[i], position) is the id
                   of a token that this engine sampled.
    eos_token_ids  of the model.
    drafts         None without drafts. Otherwise drafts.cached has the position of the newest token
                   of each row that decodes, and drafts.found has at i the number of drafts of the
                   request whose logits begin at row i * batch.width. The drafts are in the token
                   pool after the newest token. `found` has no meaning if batch.width is 1.
    failed_rows    returns the rows of the token pool that sampled in the previous step and got no
                   token. Their result of this step is dropped. Valid once the copy of the previous
                   step's tokens to the host is complete.
    """

    batch: Batch
    places: NDArray[np.intp]
    views: StepViews
    token_pool: Tensor
    eos_token_ids: tuple[int, ...]
    drafts: DraftTensors | None = None
    failed_rows: Callable[[], Collection[int]] = frozenset


class MaskedRows(NamedTuple):
    """The token masks of a step, on the device. The logits may stay sharded.

    rows, mask  int32 [R] and int32 [R, W], as kernel.apply_token_mask takes them.
    withheld    int32 [S]; rows that get no token in this step, because their masks are not ready.
                Their logits become NaN. None: no row.
    """

    rows: Tensor
    mask: Tensor
    withheld: Tensor | None = None

    def __call__(self, logits: Tensor, first_id: int = 0) -> None:
        """Change logits, [N, n] of the ids from first_id on, in place."""
        if len(self.rows):
            apply_token_mask(logits, self.rows, self.mask, first_id)
        self.withhold(logits)

    def withhold(self, logits: Tensor) -> None:
        """Make the withheld rows unusable. A row that one rank withholds gets a token on no rank.

        The ranks measure time, so they withhold different rows. The sampler, or the gather of the
        logits, lets all ranks see a NaN of one rank.
        """
        if self.withheld is not None:
            logits.index_fill_(0, self.withheld.long(), torch.nan)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """An edit that only forbids token ids. The logits may stay sharded, in the model's dtype.

    If all edits of a step are token masks and no request asks for log-probabilities, the ranks do
    not gather the logits, and a decode step samples in its CUDA graph.

    compute  returns the masks. Called once, after the forward is queued.
    """

    compute: Callable[[], MaskedRows]

    def __call__(self, logits: Tensor, first_id: int = 0) -> None:
        """Change logits, [N, n] of the ids from first_id on, in place."""
        self.compute()(logits, first_id)


class Edits(NamedTuple):
    """The edits of a step, in the order in which they apply.

    masks   applied to the logits of this rank's ids.
    others  applied to the logits of all ids; then there are no masks.
    local   whether the sampler needs the logits of this rank's ids only: the edits are token masks,
            and the step reports no log-probabilities.
    """

    masks: tuple[TokenMask, ...] = ()
    others: tuple[Edit, ...] = ()
    local: bool = True


NO_EDITS = Edits()


def prepare_edits(
    processors: "Sequence[LogitsProcessor[Any]]",
    x: StepTensors,
    runner: ModelRunner,
    failed_rows: Callable[[], Collection[int]],
) -> Edits:
    """Return the edits of a loaded step, before its forward is queued.

    failed_rows: as in ProcessingStep.
    """
    reqs, edits = x.batch.logit_edits, list[Edit]()
    if reqs:
        step = ProcessingStep(
            x.batch,
            x.logit_rows(),
            x.columns.token_views(),
            runner.token_pool,
            runner.model.config.eos_token_ids,
            runner.drafts,
            failed_rows,
        )
        for number, processor in enumerate(processors):
            edited = [(req, req.states[number]) for req in reqs if req.states[number] is not None]
            edit = processor.prepare(edited, step) if edited else None
            if edit is not None:
                edits.append(edit)
    masks = tuple(edit for edit in edits if isinstance(edit, TokenMask))
    if len(masks) == len(edits) and not x.batch.logprobs:
        return Edits(masks=masks)
    return Edits(others=tuple(edits), local=False)


class Constraint:
    """The state of a logits processor that limits the tokens of its request's output.

    At most one state of a request is a Constraint. The scheduler calls its methods. Results must
    depend only on the request and its tokens, so that all ranks get the same results. The methods
    of this class are those of a request whose output is free: it is always prepared.

    An edit may withhold a row (MaskedRows). The request then gets no token from the step on any
    rank, and the scheduler preempts it. It waits until `prepared`, and then for a row. If its next
    step gives it no token again, it fails. While the constraint is slow, the scheduler prepares
    each further edit before the step that needs it; until then the request skips the steps.

    prepares      the request waits for its preparation.
    masks_drafts  True if the edit also masks the logits after each draft, so that the request may
                  have drafts. The logits after draft i are i rows after the first ones.
    """

    prepares = False
    masks_drafts = False
    slow = False  # the last preparation took long; only rank 0 reads it

    @property
    def start_s(self) -> float:
        """The CPU seconds that `start` is known to take. All ranks get the same value."""
        return math.inf

    def start(self, client: str, here: bool = False) -> None:
        """Start the preparation in another thread. The preparations of clients take turns.

        here: prepare in this thread instead.
        """

    def prepare(self, tokens: Int32Array) -> None:
        """Start to prepare the next edit in another thread.

        A step gave no token, or the constraint is slow.

        tokens: all known tokens of the request. No step in flight uses the state.
        """

    def withdraw(self) -> None:
        """The request was aborted: a started preparation does not begin, if it still waits."""

    def prepared(self, wait_s: float | None = 0.0) -> bool:
        """Return True once the state can edit logits, or once it has failed.

        wait_s: wait at most this many seconds for a started preparation; None waits without a
        limit. The scheduler admits the request after the preparation.
        """
        return True

    def failure(self, position: int) -> RequestError | None:
        """Return the error if no token is allowed at `position`; None if a token is allowed.

        After a preparation only the result of rank 0 counts, so it may depend on measured times.
        """
        return None

    def forced(self, tokens: Int32Array) -> Sequence[int]:
        """Return the ids that must follow. tokens: all known tokens of the request.

        The scheduler may append these ids to the output. A processor finds the appended tokens in
        EditedReq.history. The scheduler then drops the result of the step in flight, so a state
        returns no ids that the drafts of that step begin with.
        """
        return ()


class LogitsProcessor(Protocol[State]):
    """Edits the logits of the requests that ask for it.

    `State` is the data that the processor keeps for one request: values from the request's
    parameters, or an object that changes, such as the matcher of a grammar. Each tensor-parallel
    rank has its own state. The scheduler keeps it from the arrival of the request to its end, also
    through preemption. A state that derives from `Constraint` takes part in scheduling.

    The processors of all ranks must make the same edits. All ranks have the same requests and
    tokens. A processor must read no other input, such as a clock or the order of a set.

    A processor may fill a mask on the host, as a grammar does. It must then advance its matcher by
    each token before the next token is sampled. In the first step that edits a request after its
    admission, EditedReq.history is set. The history holds all tokens of the request, including
    tokens that the matcher has not seen. In every later step the tokens of the previous step are
    new: one, or up to MAX_DRAFTS + 1 with drafts. The device may not have sampled them yet when the
    step is launched. The processor then works in two parts:

    1. `prepare` queues a copy of token_pool[batch.rows[index], position - 1] to the host and
       records an event after the copy. With drafts it copies the position, the newest tokens and
       the drafts, because the host does not know the position. On the stream the copy stands after
       the previous step and before the forward of this step. The event therefore completes as soon
       as the previous step and the copy are done, and does not wait for this forward.
    2. The edit runs on the host while the device computes the forward. It waits for the event,
       advances the matcher, fills the mask, uploads it and queues the operation that applies it.

    So only the sampler waits for the mask.
    """

    def open(self, params: SamplingParams) -> State | None:
        """Return the state of a new request, or None if it does not need this processor.

        Called once for each request, on arrival. Raises RequestError to reject the request.
        """

    def prepare(self, reqs: Sequence[tuple[EditedReq, State]], step: ProcessingStep) -> Edit | None:
        """Return the edit of one step, or None if the step needs none.

        reqs: the requests of the step that sample and have a state, at least one. The engine calls
        `prepare` on its stream before it queues the forward. `prepare` must not wait for the
        device. The engine calls the edit after it has queued the forward. The edit changes only the
        rows places[req.index], and queues its work on the same stream.
        """


class TokenBias:
    """Adds SamplingParams.logit_bias.

    It also forbids EOS and stop token ids until the output has SamplingParams.min_tokens tokens.
    """

    def open(self, params: SamplingParams) -> SamplingParams | None:
        return params if params.logit_bias or params.min_tokens > 0 else None

    def prepare(
        self, reqs: Sequence[tuple[EditedReq, SamplingParams]], step: ProcessingStep
    ) -> Edit | None:
        entries: list[tuple[int, int, float]] = []
        for req, params in reqs:
            entries += [(req.index, *item) for item in params.logit_bias.items()]
            if req.position < req.prompt_len + params.min_tokens:
                eos = () if params.ignore_eos else step.eos_token_ids
                forbidden = {*params.stop_token_ids, *eos}
                entries += [(req.index, token_id, _NEVER) for token_id in forbidden]
        if not entries:
            return None
        index, ids, values = zip(*entries, strict=True)
        arrays = {
            "index": step.places[np.array(index)].astype(np.int32),
            "ids": np.array(ids, dtype=np.int32),
            "values": np.array(values, dtype=np.float32),
        }
        tensors = upload(arrays, step.token_pool.device)
        return lambda logits: add_bias(logits, **tensors)


class Penalties:
    """Applies the frequency, presence and repetition penalties."""

    def open(self, params: SamplingParams) -> tuple[float, float, float] | None:
        penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        return None if penalties == (0, 0, 1) else penalties

    def prepare(
        self, reqs: Sequence[tuple[EditedReq, tuple[float, float, float]]], step: ProcessingStep
    ) -> Edit | None:
        rows = step.batch.rows
        texts = [(rows[req.index], 0, req.history) for req, _ in reqs if req.history is not None]
        put_texts(texts, step.token_pool)
        index = np.array([req.index for req, _ in reqs])
        position = np.array([req.position for req, _ in reqs], dtype=np.int32)
        values = np.array([penalties for _, penalties in reqs], dtype=np.float32)
        arrays = {
            "index": step.places[index].astype(np.int32),
            "rows": step.batch.rows[index],
            "position": position,
            "prompt_len": np.array([req.prompt_len for req, _ in reqs], dtype=np.int32),
            "frequency": values[:, 0],
            "presence": values[:, 1],
            "repetition": values[:, 2],
        }
        sent = upload(arrays, step.token_pool.device)
        tensors = PenaltyTensors(**sent, longest=int(position.max()))
        return lambda logits: apply_penalties(logits, tensors, step.token_pool)


def upload(arrays: dict[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy all arrays to the device in one transfer. The tensors keep names and dtypes.

    On a GPU the copy is asynchronous, from pinned memory that torch keeps until the copy is done.
    """
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, part in zip(arrays.values(), torch.split(buffer, sizes), strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    sent = torch.split(buffer.to(device, non_blocking=True), sizes)
    # The copy is writable, because torch warns about read-only arrays. It has no elements.
    return {
        name: part[: array.nbytes].view(torch.from_numpy(array[:0].copy()).dtype)
        for (name, array), part in zip(arrays.items(), sent, strict=True)
    }


def put_texts(texts: Sequence[tuple[int, int, Int32Array]], token_pool: Tensor) -> None:
    """Write tokens to the token pool. texts: row, first position and ids of each of them."""
    if not texts:
        return
    rows, firsts, ids = zip(*texts, strict=True)
    lengths = [len(tokens) for tokens in ids]
    spans = zip(firsts, lengths, strict=True)
    arrays = {
        "rows": np.repeat(rows, lengths),
        "cols": np.concatenate([np.arange(first, first + length) for first, length in spans]),
        "ids": np.concatenate(ids),
    }
    sent = upload(arrays, token_pool.device)
    token_pool[sent["rows"].long(), sent["cols"]] = sent["ids"]
