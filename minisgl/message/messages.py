"""Every message that crosses a process border, as msgspec structs: one tagged union per direction.

Both ends are always of the same version (one pod, one image), so there are no compatibility rules
beyond: a struct is only decoded by the decoder of its own direction.

    API server  -> tokenizer    ToTokenizer
    API server  -> scheduler    ToScheduler   (one FIFO: an abort never overtakes its request)
    leader      -> other ranks  LeaderStep
    scheduler   -> detokenizer  ToDetokenizer (one StepOutput per step, columnar)
    everything  -> API server   ToApi
"""

from collections.abc import Callable

import msgspec

from minisgl.core import FinishReason, ModelFacts, SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable (but for the stats), tagged with its class name, strict."""


class TokenizeText(Message, frozen=True, kw_only=True):
    """Encode plain text; special-token spellings in it are encoded as the tokenizer does.

    uid, here and below: set when it is sent. add_special: with the BOS that the tokenizer may set.
    """

    uid: int = 0
    text: str
    add_special: bool = True


class TokenizeChat(Message, frozen=True, kw_only=True):
    """Render a chat with the model's template and encode it (without a second BOS).

    messages_json, template_kwargs_json: JSON the API server has validated; kept as text so that
    nothing a client sends is ever decoded into one of our own types.
    """

    uid: int = 0
    messages_json: bytes
    template_kwargs_json: bytes = b"{}"


class DecodeIds(Message, frozen=True, kw_only=True):
    """Give the text of ids (int32 little-endian): the echo of a prompt that came as ids."""

    uid: int = 0
    token_ids: bytes
    skip_special: bool = True


class Ping(Message, frozen=True, kw_only=True):
    """Answered by Alive after all that was sent before it."""


TokenizeRequest = TokenizeText | TokenizeChat | DecodeIds
ToTokenizer = TokenizeRequest | Ping


class TextSpec(Message, frozen=True, kw_only=True):
    """What the detokenizer needs to turn this req's tokens into text.

    prompt_tail  the last prompt ids; a character that begins there and ends in the output comes out
                 whole.
    stop         stop strings, in the order given.
    min_tokens   until so many tokens have come, stop strings do not count.
    prompt_ids   int32 little-endian; the whole prompt when its log-probabilities are reported.
    token_ids    the client wants the ids too.
    reasoning    text between <think> and </think> is told apart.
    silent       the output is dropped: only the prompt is of interest.
    """

    prompt_tail: list[int] = []
    stop: list[str] = []
    skip_special_tokens: bool = True
    include_stop: bool = False
    min_tokens: int = 0
    prompt_ids: bytes = b""
    token_ids: bool = False
    reasoning: bool = False
    silent: bool = False


class AddReq(Message, frozen=True, kw_only=True):
    """Admit one generation. token_ids: int32 little-endian, each below the logit width.

    text: None when the receiver wants ids only (the offline LLM detokenises by itself).
    cache_salt: the prefix cache is shared with reqs of the same salt only.
    """

    uid: int
    token_ids: bytes
    sampling: SamplingParams
    text: TextSpec | None = None
    cache_salt: str = ""


class AbortReq(Message, frozen=True, kw_only=True):
    """End a req. reason STOP: a stop string was seen, so the req counts as finished."""

    uid: int
    reason: FinishReason = FinishReason.ABORT


class FlushCache(Message, frozen=True, kw_only=True):
    """Forget every cached prefix that no running req uses."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Leave the loop after the step in flight; running reqs end with ABORT."""


ToScheduler = AddReq | AbortReq | FlushCache | Shutdown


class LeaderStep(Message, frozen=True, kw_only=True):
    """The messages that every rank applies before planning iteration `iteration`."""

    iteration: int
    messages: list[ToScheduler]
    plan_hash: int | None = None


class PrefillDone(Message, frozen=True, kw_only=True):
    """Comes with a req's first output (or its end without one).

    admitted_s: CLOCK_MONOTONIC of its first admission, which all processes of a host share; 0:
    it never ran.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    text: TextSpec | None
    admitted_s: float = 0.0


class Finished(Message, frozen=True, kw_only=True):
    """The one terminal message of a req; STOP means that its last token is not text.

    error_kind: name of the RequestError that refused it; "" for a failure of ours.
    """

    uid: int
    reason: FinishReason
    error: str | None = None
    error_kind: str = ""


class TokenLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities for this step's token of one req, the most likely ids first."""

    uid: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptTokenLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities of prompt tokens position, position + 1, ... of one req."""

    uid: int
    position: int
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class StepOutput(Message, frozen=True, kw_only=True):
    """All that one step produced: token_ids[i] is the next token of uids[i]; then what ended.

    Read in this order: opened, prompt_logprobs, tokens with their logprobs, finished.
    """

    step_id: int
    opened: list[PrefillDone] = []
    uids: list[int] = []
    token_ids: list[int] = []
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptTokenLogprobs] = []


ToDetokenizer = StepOutput | Ping


class TokenizeResult(Message, frozen=True, kw_only=True):
    """To a TokenizeRequest: token_ids (int32 little-endian), or the text of DecodeIds.

    error: a sentence for the client instead. internal: the error is ours and not the client's.
    limit: what was exceeded, if that is it.
    """

    uid: int
    token_ids: bytes = b""
    text: str = ""
    error: str | None = None
    internal: bool = False
    limit: str | None = None


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """One token of a text with its log-probability (None: the first of a prompt).

    offset: characters of the text before it. top: bytes and log-probability of the most likely.
    ends: it ended the text and is no part of it.
    """

    data: bytes
    logprob: float | None
    offset: int
    top: list[tuple[bytes, float]]
    ends: bool = False


class TextUpdate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """New text of one req; `finish` and `error` only in its last update.

    completion_tokens counts all tokens so far, the stop token included; reasoning_tokens those
    between <think> and </think>, whose text is `reasoning` and not in `text`.
    prompt_logprobs, logprobs: of prompt and text, when asked for.
    stopped: it ended here, by a stop string or a failure, so the scheduler has yet to be told.
    admitted_s: as in PrefillDone.
    """

    uid: int
    text: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: list[int] = []
    reasoning: str = ""
    reasoning_tokens: int = 0
    prompt_logprobs: list[TokenText] = []
    logprobs: list[TokenText] = []
    finish: FinishReason | None = None
    error: str | None = None
    error_kind: str = ""
    stopped: bool = False
    admitted_s: float = 0.0


class StepText(Message, frozen=True, kw_only=True):
    """All text of one scheduler step."""

    updates: list[TextUpdate]


class Ready(Message, frozen=True, kw_only=True):
    """A process has loaded and warmed up. Rank 0 of the scheduler sends the model's facts.

    startup_s: how long which phase of the loading took.
    """

    role: str
    facts: ModelFacts | None = None
    startup_s: dict[str, float] = {}


STEP_PHASES = ("prefill", "decode", "mixed")
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCH_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _buckets(bounds: tuple[int, ...]) -> Callable[[], list[int]]:
    return ([0] * (len(bounds) + 1)).copy


class PhaseStats(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Totals since the start over the steps of one phase; the scheduler counts in its own.

    seconds: spent in steps; overlapped time counts once. reqs_counts[i]: steps of at most
    BATCH_SIZE_BOUNDS[i] reqs and more than the bound before, the last one above all;
    tokens_counts: the same of BATCH_TOKENS_BOUNDS.
    """

    eager_steps: int = 0
    graph_steps: int = 0
    seconds: float = 0.0
    reqs: int = 0
    tokens: int = 0
    reqs_counts: list[int] = msgspec.field(default_factory=_buckets(BATCH_SIZE_BOUNDS))
    tokens_counts: list[int] = msgspec.field(default_factory=_buckets(BATCH_TOKENS_BOUNDS))


class Alive(Message, frozen=True, kw_only=True):
    """The answer to Ping."""

    role: str


class SchedulerStats(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Gauges and running totals of rank 0, sent every 50 ms while busy and when it becomes idle.

    step_id, busy: progress, from which livez judges a hang. *_total count since the start; the
    scheduler counts in one of its own: prompt and cached tokens once per req, when its first token
    comes out, prefill tokens as they are computed, so those of resumed reqs again.
    phases: by STEP_PHASES, of steps that prefill, decode, or do both (mixed).
    """

    step_id: int = 0
    busy: bool = False
    waiting_reqs: int = 0
    running_reqs: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    locked_pages: int = 0
    total_pages: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefill_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    overlapped_steps_total: int = 0
    evicted_pages_total: int = 0
    nonfinite_rows_total: int = 0
    phases: dict[str, PhaseStats] = {}


ToApi = TokenizeResult | StepText | Ready | Alive | SchedulerStats
