"""`GrammarState`: the grammar of one request, and the position of the output in the grammar."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from minisgl.core import Grammar, GrammarFailed, RequestError, SamplingParams
from minisgl.core.batch import Int32Array
from minisgl.engine.logits_processing import Constraint
from minisgl.message.stats import ConstraintTotals
from minisgl.structured.library import TOO_COMPLEX, dead_end, failure_of, open_matcher

MAX_PREPARED_S = 0.25  # CPU time of the masks of one request in other threads, above MASK_S each
MASK_S = 0.001
SLOW_MASK_S = 0.0003  # a slower mask is not computed in a step; an ordinary mask takes 0.00002 s
QUICK_MASKS = 8  # so many masks in a row must be quick before a step computes the next one

Mask = NDArray[np.int32]  # [W]; id i is allowed if bit i % 32 of word i // 32 is set


class Compiled(NamedTuple):
    """A compiled grammar, and the seconds that the compilation took."""

    matcher: LLMatcher
    seconds: float


@dataclass(eq=False)
class GrammarState(Constraint):
    """Follows the output of one request through its grammar.

    The output of a reasoning model may begin with thinking, which is free text that closes with
    think_end. The rest follows the grammar. With a trigger, the text before it is free and may end.
    EOS ids and stop token ids end the output. Inside the grammar they are therefore allowed only
    where it accepts the text as complete. With ignore_eos, an EOS id is allowed only where the text
    is complete and no other token can follow.

    A copy of the state follows the drafts of a step. The matcher of a copy shares the lexer of the
    original, and the limit of lexer states counts the states of both. So wrong drafts could make
    the original fail. A matcher that fails after it was copied is therefore replaced by a new one
    with a lexer of its own, and the request gets no further drafts. `prepare` replaces the matcher
    too if steps have drafts, because some ranks have copied it in the step that gave no token, and
    others have not.

    compile        compiles the grammar at the turn of this client, or in the calling thread if the
                   second argument is True.
    eos_token_ids  the EOS ids of the model.
    totals         the counters of all requests; this state adds to them.
    prepare_mask   starts `compute_ahead` with these tokens in another thread.
    client         the client of the request, from `start` on.
    drafting       the steps of the engine have drafts.
    ready          the next mask, if `compute_ahead` has computed it.
    forces_tokens  False: `forced` returns no token.
    _compiled      the matcher, from the thread that compiles the grammar.
    _drafts        the drafts of the last step before the first one that the grammar forbids or that
                   ends the output, and the number of tokens before them. Copies add to it.
    _seen          number of tokens, prompt and output, that the state has followed; -1 before the
                   first step that samples.
    _first         position of the first output token; valid from the first step that samples.
    _free_until    while the output is free text: the token that ends the free text; None: the
                   grammar applies.
    _followed      the tokens that the matcher has consumed.
    _is_copy       the state follows drafts.
    _copied, _renewed
                   the matcher has been copied; it has been replaced by a new one.
    _failed        the first error, and the position at which no token was allowed; position None:
                   the grammar could not be compiled.
    _preparation   the thread that computes a mask; its result is the CPU time in seconds.
    _quick         the number of quick masks from other threads, since the last slow one.
    _prepared_s    CPU time of the masks that other threads have computed, above MASK_S each.
    """

    params: SamplingParams
    grammar: Grammar
    compile: Callable[[str, bool], Future[Compiled]]
    eos_token_ids: tuple[int, ...]
    totals: ConstraintTotals
    prepare_mask: "Callable[[GrammarState, list[int]], Future[float]]"
    forces_tokens: bool = True
    client: str = ""
    drafting: bool = False
    ready: Mask | None = None
    _free_until: int | None = None
    _compiled: Future[Compiled] | None = None
    _matcher: LLMatcher | None = None
    _seen: int = -1
    _first: int = 0
    _followed: list[int] = field(default_factory=list)
    _drafts: tuple[list[int], int] = field(default_factory=lambda: ([], -1))
    _is_copy: bool = False
    _copied: bool = False
    _renewed: bool = False
    _failed: tuple[int | None, RequestError] | None = None
    _preparation: Future[float] | None = None
    _prepared_s: float = 0.0
    _quick: int = 0

    prepares = True
    masks_drafts = True

    def __post_init__(self) -> None:
        if not self._is_copy:
            thinks = self.grammar.thinking == "open"
            self._free_until = self.grammar.think_end if thinks else self._trigger
        self._ends = {*self.eos_token_ids, *self.params.stop_token_ids}

    # --- called by the scheduler ----------------------------------------------------------------

    @property
    def start_s(self) -> float:
        """As Constraint.start_s."""
        return self.grammar.compile_s

    def start(self, client: str, here: bool = False) -> None:
        """As Constraint.start."""
        self.client = client
        self._compiled = self.compile(client, here)

    def prepare(self, tokens: Int32Array) -> None:
        """As Constraint.prepare."""
        self._preparation = self.prepare_mask(self, tokens.tolist())

    def withdraw(self) -> None:
        """As Constraint.withdraw."""
        for future in (self._compiled, self._preparation):
            if future is not None:
                future.cancel()

    def prepared(self, wait_s: float | None = 0.0) -> bool:
        """As Constraint.prepared."""
        if self._preparation is not None:
            if not wait([self._preparation], wait_s).done:
                return False
            seconds = self._preparation.result()
            self._quick = 0 if seconds > SLOW_MASK_S else self._quick + 1
            self.slow = self._quick < QUICK_MASKS
            self._prepared_s += max(seconds - MASK_S, 0.0)
            self._preparation = None
            return True
        if self._compiled is None:
            return False
        done = bool(wait([self._compiled], wait_s).done)
        if done and self._matcher is None and self._failed is None:
            try:
                self._matcher, seconds = self._compiled.result()
            except RequestError as error:
                self._failed = None, error
            else:
                self.totals.compiles += 1
                self.totals.compile_seconds += seconds
        return done

    def failure(self, position: int) -> RequestError | None:
        """As Constraint.failure. Also fails if `prepare` has taken more than MAX_PREPARED_S."""
        if self._failed is not None and self._failed[0] in (None, position):
            return self._failed[1]
        if self._prepared_s <= MAX_PREPARED_S:
            return None
        reason = f"the allowed tokens took more than {MAX_PREPARED_S:g} s of CPU time"
        return GrammarFailed(f"the grammar is too complex: {reason}; simplify it", code=TOO_COMPLEX)

    def forced(self, tokens: Int32Array) -> Sequence[int]:
        """As Constraint.forced. An EOS id follows a text that is complete and cannot go on."""
        self.follow(tokens[self._seen :].tolist())
        free = self._free_until is not None or not self.forces_tokens
        if free or self._failed is not None or self.matcher.is_error():
            return []
        if self.matcher.is_stopped():
            return self._forced_end
        ids = self.matcher.compute_ff_tokens()
        stops = [at for at, token in enumerate(ids) if token in self._ends]
        ids = ids[: stops[0]] if stops else ids
        drafts, at = self._drafts
        return [] if at == self._seen and drafts[: len(ids)] == ids else ids

    # --- called by another thread ---------------------------------------------------------------

    def compute_ahead(self, tokens: list[int], tokenizer: LLTokenizer) -> float:
        """Follow the output and compute the next mask. Returns the CPU time in seconds.

        tokens: all known tokens of the request.
        """
        began_s = time.thread_time()
        self.follow(tokens[self._seen :])
        if self.drafting:
            self._renew(tokenizer)
        mask = np.empty(-(-tokenizer.vocab_size // 32), dtype=np.int32)
        while True:
            if self.masked_by_grammar:
                self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if not self.renew(tokenizer):
                break
        self.complete(mask)
        self.ready = mask
        return time.thread_time() - began_s

    # --- called by the processor ----------------------------------------------------------------

    @property
    def matcher(self) -> LLMatcher:
        """The matcher of a request that runs."""
        assert self._matcher is not None, "a running request must have a grammar; this is a bug"
        return self._matcher

    @property
    def masked_by_grammar(self) -> bool:
        """True if the matcher computes the next mask."""
        return self._free_until is None and not self.matcher.is_error()

    def unseen(self, position: int, prompt_len: int) -> int:
        """Return the number of tokens before `position` that the state has not followed."""
        if self._seen < 0:
            self._seen = self._first = prompt_len
        return position - self._seen

    def follow(self, tokens: Iterable[int]) -> None:
        """Follow the next tokens of the output."""
        for token in tokens:
            if self.count(token):
                self.matcher.consume_token(token)

    def count(self, token: int) -> bool:
        """Count the next token of the output; return True if the matcher has to consume it."""
        thinks = self._may_think and token == self.grammar.think_start
        consumes = self._free_until is None and not thinks
        self.ready = None
        if thinks:
            self._free_until = self.grammar.think_end
        elif token == self._free_until:
            self._free_until = self._trigger if token == self.grammar.think_end else None
        self._seen += 1
        if consumes:
            self._followed.append(token)
        return consumes

    def before(self, draft: int) -> "GrammarState | None":
        """Return the state for the position after a draft that the mask of this position allows.

        The caller lets the returned state follow the draft. It is a new copy, or the state itself
        if this is a copy already. Returns None if no token may be sampled after the draft: the
        draft ends the output, or the state makes no copies.
        """
        if self._renewed or draft in self._ends:
            return None
        if self._is_copy:
            self._drafts[0].append(draft)
            return self
        self._copied = True
        self._drafts = [draft], self._seen
        matcher = self.matcher.deep_copy()
        return replace(self, _matcher=matcher, _followed=[], _is_copy=True, _copied=False)

    def renew(self, tokenizer: LLTokenizer) -> bool:
        """Replace the matcher if it failed after it was copied. Returns True if it did so."""
        ended = bool(self._followed) and self._followed[-1] in self._ends
        if not self._copied or self._renewed or ended or not self.matcher.is_error():
            return False
        self._renew(tokenizer)
        return True

    def _renew(self, tokenizer: LLTokenizer) -> None:
        self._matcher = open_matcher(tokenizer, self.grammar.source, self.grammar.kind)
        self._matcher.consume_tokens(self._followed)
        self._renewed = True
        self._drafts = [], -1

    def complete(self, mask: Mask) -> None:
        """Complete the mask of the next token in place. After a failure, the mask forbids all ids.

        mask: as the matcher computed it, if masked_by_grammar; otherwise its content is undefined.
        After drafts, an output that `forced` would end gets the same EOS id.
        """
        params = self.params
        if self._free_until is not None:
            mask[:] = -1
            if self._free_until != self._trigger:
                _set(mask, self._ends, False)
            return
        if self.matcher.is_error():
            self._fail(mask, failure_of(self.matcher))
            return
        if self._is_copy and self.forces_tokens and self.matcher.is_stopped() and self._forced_end:
            mask[:] = 0
            _set(mask, self._forced_end, True)
            return
        complete = self.matcher.is_accepting()
        _set(mask, self._ends, complete and self._may_end)
        if self._may_think:
            _set(mask, [self.grammar.think_start], True)
        if complete and self._may_end:
            if params.ignore_eos:
                _set(mask, self.eos_token_ids, False)
                if not mask.any():
                    _set(mask, self.eos_token_ids, True)
        elif (complete or params.stop_token_ids) and not mask.any():
            reason = "the text can go on only with one of stop_token_ids"
            if complete:
                reason = f"the grammar ends the text before min_tokens={params.min_tokens}"
            self._fail(mask, dead_end(reason))

    @property
    def _trigger(self) -> int | None:
        return self.grammar.trigger if self.grammar.trigger >= 0 else None

    @property
    def _forced_end(self) -> Sequence[int]:
        """The EOS id that follows a text which is complete and cannot go on."""
        return self.eos_token_ids[:1] if self._may_end else ()

    @property
    def _may_think(self) -> bool:
        return self.grammar.thinking == "allowed" and self._seen == self._first

    @property
    def _may_end(self) -> bool:
        return self._seen >= self._first + self.params.min_tokens

    def _fail(self, mask: Mask, error: RequestError) -> None:
        mask[:] = 0
        self._failed = self._failed or (self._seen, error)


def allows(mask: Mask, token: int) -> bool:
    """True if the mask allows the id."""
    return token < 32 * len(mask) and bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)


def _set(mask: Mask, ids: Iterable[int], allowed: bool) -> None:
    """Allow or forbid the ids that the mask covers."""
    words = mask.view(np.uint32)
    for token in ids:
        if token < 32 * len(words):
            bit = np.uint32(1 << token % 32)
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
