"""`Req`, one generation inside the scheduler, and its construction from an AddReq message."""

import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec.structs import force_setattr

from minisgl.core import FinishReason, InvalidRequest, PromptTooLong, SamplingParams
from minisgl.core.batch import Int32Array
from minisgl.core.images import ImageLimits
from minisgl.core.rows import Prefixes
from minisgl.core.sampling import MAX_SEED
from minisgl.engine import Extensions
from minisgl.engine.logits_processing import Constraint
from minisgl.message.messages import AddReq, PromptImage, TokenLogprobs
from minisgl.scheduler.image_check import check_images


class ReqState(StrEnum):
    """The state of a request, in this order. Preemption returns the request to WAITING.

    Forced tokens return the request from DECODE to PREFILL. A step that gives a request with a
    constraint no token returns it to PREPARING, and so does each step if its edits are slow.
    """

    # As WAITING, but outside of the queue until its constraint is prepared. A request whose edits
    # are slow keeps its row and pages meanwhile. A request whose prefix is being loaded from host
    # memory is PREPARING too, and owns neither a row nor pages.
    PREPARING = "preparing"
    WAITING = "waiting"  # owns neither a row nor pages
    PREFILL = "prefill"  # owns a row and its prompt's pages; part of the prompt is not launched
    DECODE = "decode"  # the whole prompt is launched; each step adds a token, with drafts several
    ENDING = "ending"  # keeps its row until the step in flight that contains it is resolved
    FINISHED = "finished"  # owns neither row nor pages; its Finished message has been built


UNCONSTRAINED = Constraint()


@dataclass(slots=True, eq=False)
class Req:
    """One generation: its parameters, its state and the memory that it owns.

    Lengths that change with every step are columns of RequestTable, at index `row`.

    tokens            int32; prompt and outputs so far. Valid while the request owns no row; a
                      running request has its tokens in RequestTable.tokens.
    prompt_len        tokens of the prompt that the client sent.
    max_total_tokens  the request ends at this number of prompt and output tokens.
    uncached_tokens   estimate of the tokens that the request itself has to compute, made when it
                      begins to wait. It leaves out tokens in the prefix cache and tokens that an
                      older request computes.
    arrival_index     position in the order of arrival. Among the running requests of one priority
                      and client, a plan preempts the highest index first.
    row               index in page table, token pool and RequestTable; -1 while the request owns no
                      row.
    end_reason        set when the request is to end. A request in state ENDING without a reason is
                      being preempted and waits again afterwards.
    cache_salt        only requests with an equal salt share cached prefixes.
    session           as in AddReq.
    prefixes          as in Rows: where other requests may leave the tokens of this one.
    client, call      the client and its call, which take turns in the queue.
    priority          requests with a lower number are served first. `raise_delayed` lowers it for a
                      request that many others have overtaken.
    logit_states      state of each logits processor for this request; empty without edited logits.
    constraint        the element of logit_states that is a Constraint, if there is one.
    slow              each edit of the request is prepared before its step.
    loaded            its prefix has been loaded from host memory since it began to wait. It is not
                      loaded again.
    failed_at         number of tokens at which a step last gave the request no token; -1: none did.
    cached_tokens     prompt tokens that the prefix cache held at the first admission, as reported
                      to the client.
    known_tokens      prompt tokens that the prefix cache knew then; at least cached_tokens.
    admitted          True from the first admission on, also while the request waits again after
                      a preemption.
    admitted_s        time of the first admission, as in PrefillDone; 0.0 before.
    prefill_done      True once its PrefillDone message has been built.
    prompt_reported   number of prompt tokens whose log-probabilities have been reported.
    held_logprobs     log-probabilities of the prompt that wait for the PrefillDone message.
    images            those of the prompt, in their order. They are kept until the request ends,
                      because a preempted request computes its prompt again.
    largest_span      as in Rows.
    prediction        int32; the output that the client expects, the source of drafts. Empty if
                      there is none, or after the admission of a request that may not draft.
    """

    uid: int
    tokens: Int32Array
    prompt_len: int
    max_total_tokens: int
    sampling: SamplingParams
    arrival_index: int
    cache_salt: str = ""
    session: str = ""
    prefixes: Prefixes = field(default_factory=lambda: Prefixes(0, 0, []))
    client: str = ""
    call: int = 0
    priority: int = 0
    logit_states: tuple[Any, ...] = ()
    constraint: Constraint = UNCONSTRAINED
    state: ReqState = ReqState.WAITING
    uncached_tokens: int = 0
    slow: bool = False
    failed_at: int = -1
    loaded: bool = False
    row: int = -1
    cached_tokens: int = 0
    known_tokens: int = 0
    admitted: bool = False
    admitted_s: float = 0.0
    prefill_done: bool = False
    end_reason: FinishReason | None = None
    prompt_reported: int = 0
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)
    images: tuple[PromptImage, ...] = ()
    largest_span: int = 1
    prediction: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def matchable(self) -> int:
        """The number of leading tokens that a cached prefix may cover: at least one is computed.

        A request for log-probabilities of its prompt computes the whole prompt.
        """
        return 0 if self.sampling.prompt_logprobs is not None else len(self.tokens) - 1


def accept_requests(
    message: AddReq,
    vocab_size: int,
    capacity_tokens: int,
    first_arrival: int,
    extensions: Extensions,
    images: ImageLimits | None = None,
) -> list[Req]:
    """Check `message` against the engine's limits, and return the request of each of its choices.

    The requests share the memory of the prompt. The check takes place once: its time for 1,000
    choices would delay the steps of all clients.

    The API server has already checked the same limits. This second check protects the ranks: an
    invalid message would make all of them fail.

    vocab_size: width of the logits; each token id is below it. images: as in EngineLike.
    capacity_tokens: prompt and output tokens that context length and KV pool allow one request.
    Raises RequestError (InvalidRequest, PromptTooLong) for a request that could never complete, or
    that a logits processor rejects.
    """
    tokens = np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32, copy=False)
    sampling = message.sampling
    sampling.validate(vocab_size)
    if not len(tokens):
        raise InvalidRequest("the prompt is empty", param="prompt")
    check_images(message, tokens, images)
    prediction = np.frombuffer(message.prediction, dtype="<i4").astype(np.int32, copy=False)
    for param, ids in (("prompt", tokens), ("prediction", prediction)):
        negative = ids is prediction and ids.min(initial=0) < 0
        if negative or ids.max(initial=0) >= vocab_size:
            raise InvalidRequest(f"a token id is outside 0..{vocab_size - 1}", param=param)
    needed = len(tokens) + (sampling.max_tokens or 1)
    if needed > capacity_tokens:
        raise PromptTooLong(
            f"{len(tokens)} prompt tokens and {sampling.max_tokens or 1} output tokens exceed the "
            f"{capacity_tokens} tokens that the context length and the KV pool allow",
            param="prompt",
        )
    # The API server draws a seed for a request without one. The uid is the fallback for other
    # senders: every rank must use the same seed.
    first_seed = message.uid if sampling.seed is None else sampling.seed
    grids = [image.grid for image in message.images]
    largest_span = 1 if images is None else images.largest_span(grids)
    reqs = []
    for index in range(message.count):
        params = _of_choice(sampling, first_seed, index)
        states = extensions.open_states(params)
        req = Req(
            uid=message.uid + index,
            tokens=tokens,
            prompt_len=len(tokens),
            max_total_tokens=capacity_tokens if params.max_tokens is None else needed,
            sampling=params,
            arrival_index=first_arrival + index,
            cache_salt=message.cache_salt,
            session=message.session,
            prefixes=Prefixes(*message.prefixes, []),
            client=message.client,
            call=message.call,
            priority=message.priority,
            logit_states=states,
            constraint=next((s for s in states if isinstance(s, Constraint)), UNCONSTRAINED),
            images=message.images,
            largest_span=largest_span,
            prediction=prediction,
        )
        reqs.append(req)
    return reqs


def _of_choice(sampling: SamplingParams, first_seed: int, index: int) -> SamplingParams:
    """Return the parameters of one choice: checked values with a seed of its own.

    msgspec.structs.replace would check all of them again.
    """
    params, seed = copy.copy(sampling), first_seed + index
    force_setattr(params, "seed", seed if seed <= MAX_SEED else seed - 2**64)
    if index:
        force_setattr(params, "prompt_logprobs", None)
    return params
