"""A constraint that knows the output of its request and forces pieces of it."""

import math
from collections.abc import Sequence

from minisgl.core import GrammarFailed, RequestError, SamplingParams
from minisgl.core.batch import EditedReq, Int32Array
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.logits_processing import Constraint, Edit, ProcessingStep


class ScriptedParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters of a request with a Scripted constraint.

    prompt_len  of the request.
    script      the output that the engine will sample.
    stretch     forced tokens have up to this many ids.
    polls       the constraint is prepared after this many questions.
    broken      the preparation fails.
    most_preparations
                further preparations take too long.
    start_s     of the constraint.
    slow        of the constraint: each edit is prepared before its step.
    """

    prompt_len: int = 0
    script: tuple[int, ...] = ()
    stretch: int = 0
    polls: int = 0
    broken: bool = False
    most_preparations: int = 10**9
    start_s: float = math.inf
    slow: bool = False

    def __post_init__(self) -> None:
        """Check nothing: a test may queue parameters that the scheduler must refuse itself."""


class Scripted(Constraint):
    """The state of one request."""

    prepares = True
    masks_drafts = True

    def __init__(self, params: ScriptedParams) -> None:
        self.params = params
        self.polls, self.slow = params.polls, params.slow
        self.client: str | None = None  # None before `start`
        self.withdrawn = False
        self.preparations: list[int] = []

    @property
    def start_s(self) -> float:
        return self.params.start_s

    def start(self, client: str, here: bool = False) -> None:
        assert self.client is None, "a preparation starts once"
        self.client = client
        self.polls = 0 if here else self.polls

    def withdraw(self) -> None:
        self.withdrawn = True

    def prepared(self, wait_s: float | None = 0.0) -> bool:
        if self.client is None:
            return False
        self.polls = 0 if wait_s is None else self.polls - 1
        return self.polls <= 0

    def prepare(self, tokens: Int32Array) -> None:
        self.preparations.append(len(tokens))
        self.polls = self.params.polls

    def failure(self, position: int) -> RequestError | None:
        if len(self.preparations) > self.params.most_preparations:
            return GrammarFailed("the script takes too long", code="slow")
        return GrammarFailed("the script is broken", code="broken") if self.params.broken else None

    def forced(self, tokens: Int32Array) -> Sequence[int]:
        output = tokens[self.params.prompt_len :].tolist()
        done = len(output)
        assert self.params.script[:done] == tuple(output), "the tokens are not those of the script"
        length = (7 * len(tokens) + len(self.params.script)) % (self.params.stretch + 1)
        return self.params.script[done : done + length]


class ScriptedProcessor:
    """Opens the states. Edits nothing, because the fake engine has no logits."""

    def open(self, params: SamplingParams) -> Scripted | None:
        scripted = isinstance(params, ScriptedParams) and params.script
        return Scripted(params) if scripted else None

    def prepare(self, reqs: Sequence[tuple[EditedReq, Scripted]], step: ProcessingStep) -> Edit:
        raise AssertionError("the fake engine prepares no edits")


SCRIPTED = Extensions(
    logits_processors=(*DEFAULT_EXTENSIONS.logits_processors, ScriptedProcessor())
)
