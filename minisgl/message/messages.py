"""The messages between processes, as msgspec structs: one tagged union per direction.

    API server  -> tokenizer    ToTokenizer
    API server  -> grammars     ToGrammars
    API server  -> scheduler    ToScheduler    one queue: an abort never overtakes its request
    API server  -> detokenizer  StartText      before the AddReq of the same uid
    leader      -> other ranks  LeaderStep
    scheduler   -> detokenizer  StepOutput     one per step, with one list per kind of output
    all others  -> API server   ToApi

Both ends have the same version, because they run in one pod from one image. The messages therefore
need no compatibility rules. Each queue has a decoder for its own union only.
"""

from minisgl.core import FinishReason, ModelFacts, SamplingParams, TokenizerInfo
from minisgl.core.step_cost import StepCost
from minisgl.message.images import PromptImage as PromptImage
from minisgl.message.images import SourceImage as SourceImage
from minisgl.message.preparation import CompileGrammar as CompileGrammar
from minisgl.message.preparation import DecodeIds as DecodeIds
from minisgl.message.preparation import GrammarResult as GrammarResult
from minisgl.message.preparation import TokenizeChat as TokenizeChat
from minisgl.message.preparation import TokenizeResult as TokenizeResult
from minisgl.message.preparation import TokenizeText as TokenizeText
from minisgl.message.stats import SchedulerStats as SchedulerStats
from minisgl.message.text import TextOptions as TextOptions
from minisgl.message.text import TokenLogprob as TokenLogprob
from minisgl.message.text import ToolCallDelta as ToolCallDelta
from minisgl.message.text import ToolOptions as ToolOptions
from minisgl.message.wire import WireMessage as WireMessage


class Ping(WireMessage, frozen=True, kw_only=True):
    """The receiver answers with Alive when it has handled all messages before. The process
    for grammars answers after the grammar that it compiles."""


TokenizeRequest = TokenizeText | TokenizeChat | DecodeIds
ToTokenizer = TokenizeRequest | Ping
ToGrammars = CompileGrammar | Ping


class StartText(WireMessage, frozen=True, kw_only=True):
    """The text options of one request, sent before its AddReq.

    The detokenizer has two senders and their messages have no common order: a StepOutput with
    outputs of this request may be read before its StartText. The detokenizer then keeps those
    outputs until the StartText arrives.
    """

    uid: int
    options: TextOptions


class AddReq(WireMessage, frozen=True, kw_only=True):
    """Run `count` requests with one prompt: the choices of a call. Choice i has the uid `uid` + i.

    The scheduler sends exactly one PrefillDone and one Finished for each choice. The choices share
    one copy of the prompt. Choice i draws with seed + i. Only the first choice reports the
    log-probabilities of the prompt.

    token_ids   int32 little-endian, each below the width of the logits. Image pads are negative.
    images      in the order of their pads.
    prediction  the output that the client expects, in the same form. Drafts come from it.
    cache_salt  only requests with the same salt share cached prefixes.
    session     key of the session of the client to which the request belongs; "": unknown.
    client      the client that the API key names; clients take turns. "" in an offline run.
    call        number of the call; the calls of a client take turns. 0 in an offline run.
    priority    requests with a lower number are served first.
    prefixes    the tokens before the generation prompt, and those of the first message; 0: unknown.
    """

    uid: int
    token_ids: bytes
    sampling: SamplingParams
    prediction: bytes = b""
    cache_salt: str = ""
    session: str = ""
    count: int = 1
    client: str = ""
    call: int = 0
    priority: int = 0
    prefixes: tuple[int, int] = (0, 0)
    images: tuple[PromptImage, ...] = ()


class AbortReq(WireMessage, frozen=True, kw_only=True):
    """End a request. Reason STOP: a stop string ended its text, so the request is complete."""

    uid: int
    reason: FinishReason = FinishReason.ABORT


class EndSession(WireMessage, frozen=True, kw_only=True):
    """No request of this session follows: evictions begin with the pages that only it has used.

    session: as in AddReq.
    """

    session: str


class FlushCache(WireMessage, frozen=True, kw_only=True):
    """Evict every cached prefix that no running request uses."""


class Shutdown(WireMessage, frozen=True, kw_only=True):
    """Leave the loop after the step in flight. Running requests end with ABORT."""


class Prepared(WireMessage, frozen=True, kw_only=True):
    """The constraints of these requests are prepared on rank 0: all ranks enqueue them, or end
    those in `failed`. The requests in `slow` pause after each token."""

    uids: list[int]
    failed: list[int] = []
    slow: list[int] = []


class CopiesEnded(WireMessage, frozen=True, kw_only=True):
    """These jobs of the host tier have ended on rank 0: every rank ends them too (HostTier).

    num_open: the number of blocks that rank 0 can use, as HostTier.num_open.
    """

    jobs: list[int]
    num_open: int


class SetStepCost(WireMessage, frozen=True, kw_only=True):
    """Rank 0 has fitted this step cost to its steps: every rank plans with it from now on."""

    cost: StepCost


# Rank 0 adds these to its own input, so all ranks apply them in one iteration.
OfRank0 = Prepared | CopiesEnded | SetStepCost
ToScheduler = AddReq | AbortReq | EndSession | FlushCache | Shutdown | OfRank0


class LeaderStep(WireMessage, frozen=True, kw_only=True):
    """The messages that every rank applies before it plans iteration `iteration`.

    plan_hash  hash of the leader's last step. Each other rank compares it with that of its own.
    """

    iteration: int
    messages: list[ToScheduler]
    plan_hash: int | None = None


class PrefillDone(WireMessage, frozen=True, kw_only=True):
    """The scheduler's first message about a request, before its outputs and its Finished message.

    admitted_s  time of the first admission, CLOCK_MONOTONIC in seconds, a clock that all processes
                of a host share. 0: the request never ran.
    prediction_tokens  of the prediction; 0 if the request may not draft.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    admitted_s: float = 0.0
    prediction_tokens: int = 0


class Finished(WireMessage, frozen=True, kw_only=True):
    """The last message about a request. If the reason is STOP, the text ends before the last token.

    error       the error message; None unless the reason is ERROR.
    error_kind  class name of the RequestError that refused the request; "" for an internal error.
    """

    uid: int
    reason: FinishReason
    error: str | None = None
    error_kind: str = ""


class TokenLogprobs(WireMessage, frozen=True, kw_only=True):
    """Log-probabilities of consecutive tokens of one request: prompt tokens, or one output token.

    position      index of the first of these tokens; the first token of the prompt has index 0.
    logprobs      one for each token.
    top_ids       for each token, the ids of the most likely tokens, the most likely first.
    top_logprobs  their log-probabilities.
    """

    uid: int
    position: int
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class StepOutput(WireMessage, frozen=True, kw_only=True):
    """All outputs of one step; token_ids[i] is the next token of request uids[i].

    predicted: uid, and number of its tokens that the request's prediction had at their place.

    The detokenizer applies the lists in this order: prefill_done, prompt_logprobs, the tokens with
    their logprobs, finished.
    """

    step_id: int
    prefill_done: list[PrefillDone] = []
    uids: list[int] = []
    token_ids: list[int] = []
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    predicted: list[tuple[int, int]] = []


ToDetokenizer = StartText | StepOutput | Ping


class TextUpdate(WireMessage, frozen=True, kw_only=True, omit_defaults=True):
    """New text of one request. The last update has `finish` and, after a failure, `error`.

    completion_tokens  number of output tokens so far, with the stop token.
    reasoning          new text between <think> and </think>. It is not in `text`.
    reasoning_tokens   number of output tokens so far between <think> and </think>.
    prompt_logprobs, logprobs
                       log-probabilities of new tokens, if the client asked for them.
    calls              new parts of tool calls, which are not in `text`.
    call_failures      number of new texts that began as a tool call and were not a complete call.
    stopped            True if a stop string or a failure of the detokenizer ended the request. The
                       scheduler does not know yet that the request has ended.
    stop_string        the stop string that ended the text.
    admitted_s, prediction_tokens
                       as in PrefillDone.
    accepted_prediction_tokens
                       number of output tokens so far that equal a draft from the prediction.
    """

    uid: int
    text: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: list[int] = []
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: list[ToolCallDelta] = []
    call_failures: int = 0
    prompt_logprobs: list[TokenLogprob] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    error: str | None = None
    error_kind: str = ""
    stopped: bool = False
    stop_string: str = ""
    admitted_s: float = 0.0
    prediction_tokens: int = 0
    accepted_prediction_tokens: int = 0


class StepText(WireMessage, frozen=True, kw_only=True):
    """The new text of one scheduler step."""

    updates: list[TextUpdate]


class Ready(WireMessage, frozen=True, kw_only=True):
    """A process has completed its start and can serve requests.

    facts        facts about the model; only rank 0 of the scheduler sends them.
    tool_format, template_variables, tokenizer
                 only tokenizer processes send them; the first two are those of ModelFacts.
    startup_s    seconds of each phase of the start.
    """

    role: str
    facts: ModelFacts | None = None
    tool_format: str | None = None
    template_variables: tuple[str, ...] = ()
    tokenizer: TokenizerInfo | None = None
    startup_s: dict[str, float] = {}


class Alive(WireMessage, frozen=True, kw_only=True):
    """The answer to Ping. role: the name of the process."""

    role: str


ToApi = TokenizeResult | GrammarResult | StepText | Ready | Alive | SchedulerStats
