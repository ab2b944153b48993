"""`GrammarProcessor`: the logits processor that keeps outputs inside their grammars."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import ConfigError, Grammar, SamplingParams, Unsupported
from minisgl.core.batch import MAX_DRAFTS, EditedReq
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.logits_processing import ProcessingStep, TokenMask, upload
from minisgl.message.stats import ConstraintTotals
from minisgl.models.config import load_model_spec
from minisgl.structured.compile_threads import CompileThreads, raise_stack_limit
from minisgl.structured.library import compile_grammar, load_tokenizer
from minisgl.structured.matcher import Compiled, GrammarState, allows

COMPILE_THREADS = 3
MAX_MASK_THREADS = 8


def with_grammars(model_path: str, extensions: Extensions = DEFAULT_EXTENSIONS) -> Extensions:
    """Return `extensions` with a GrammarProcessor for this model folder. Raises ConfigError."""
    processor = GrammarProcessor(model_path, load_model_spec(model_path).eos_token_ids)
    processors = (*extensions.logits_processors, processor)
    return replace(extensions, logits_processors=processors, constraint_totals=processor.totals)


class GrammarProcessor:
    """Computes the token masks of the requests with a grammar.

    Three threads compile grammars (CompileThreads). One of them reads the model's tokenizer at the
    start. The masks of a step are computed on the host while the device computes its forward.

    totals         the counters of all requests.
    forces_tokens  True: the scheduler appends forced tokens. False: a step samples every token of
                   the requests that are opened from now on. A benchmark compares both values.
    """

    forces_tokens = True

    def __init__(self, model_path: str, eos_token_ids: tuple[int, ...]) -> None:
        """Start to read the tokenizer. eos_token_ids: the EOS ids of the model."""
        raise_stack_limit()
        self.totals = ConstraintTotals()
        self._eos_token_ids = eos_token_ids
        self._threads = CompileThreads(COMPILE_THREADS)
        load = partial(load_tokenizer, model_path, eos_token_ids)
        self._tokenizer = self._threads.submit("", load)
        cores = os.cpu_count() or 1
        self._library = LLExecutor(max(1, min(cores // 2, MAX_MASK_THREADS)))

    def open(self, params: SamplingParams) -> GrammarState | None:
        """As LogitsProcessor.open."""
        grammar = params.grammar
        if grammar is None:
            return None
        assert isinstance(grammar, Grammar), "the front end must compile grammars: this is a bug"
        function = partial(_compile, self._tokenizer, grammar.source)
        compile = partial(self._threads.submit, function=function)
        return GrammarState(
            params, grammar, compile, self._eos_token_ids, self.totals, self.forces_tokens
        )

    def prepare(
        self, reqs: Sequence[tuple[EditedReq, GrammarState]], step: ProcessingStep
    ) -> TokenMask:
        """As LogitsProcessor.prepare. Queues the copy of new tokens and drafts to the host."""
        sampled = [req for req, _ in reqs if req.history is None]
        newest = _NewTokens(sampled, step) if sampled else None

        def compute() -> tuple[Tensor, Tensor]:
            found = {} if newest is None else newest.wait()
            began_s = time.perf_counter()
            followed = []
            positions = []
            for req, state in reqs:
                drafts: list[int] = []
                if req.history is not None:
                    count = state.unseen(req.position, req.prompt_len)
                    state.follow(req.history[req.position - count :].tolist())
                else:
                    position, tokens, drafts = found[req.index]
                    count = state.unseen(position, req.prompt_len)
                    followed.append((state, tokens[len(tokens) - count :]))
                positions.append(_Position(state, int(step.places[req.index]), drafts))
            self._follow(followed)
            sent = self._compute_masks(positions, step.token_pool.device)
            self.totals.masks += len(sent[0])
            self.totals.mask_seconds += time.perf_counter() - began_s
            return sent

        return TokenMask(compute)

    def _follow(self, followed: Sequence[tuple[GrammarState, Sequence[int]]]) -> None:
        """Let each state follow its tokens."""
        for nth in range(max((len(tokens) for _, tokens in followed), default=0)):
            consumed = [
                (state.matcher, tokens[nth])
                for state, tokens in followed
                if nth < len(tokens) and state.count(tokens[nth])
            ]
            if consumed:
                self._library.consume_token_par(consumed)

    def _compute_masks(
        self, positions: Sequence["_Position"], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the result of TokenMask.compute for states that have followed every token.

        A draft that the mask of its position forbids is never accepted, so the positions after it
        get no mask.
        """
        words = -(-self._tokenizer.result().vocab_size // 32)
        most = sum(1 + len(position.drafts) for position in positions)
        # One transfer sends all masks, and after them all rows.
        size, pinned = most * (words + 1), device.type == "cuda"
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        rows: list[int] = []
        while positions:
            masks = buffer[len(rows) * words :][: len(positions) * words].view(-1, words)
            self._fill([position.state for position in positions], masks)
            rows += [position.row for position in positions]
            positions = self._after_drafts(positions, masks.numpy())
        count = len(rows)
        buffer[count * words : count * (words + 1)] = torch.tensor(rows, dtype=torch.int32)
        sent = buffer[: count * (words + 1)].to(device, non_blocking=True)
        return sent[count * words :], sent[: count * words].view(count, words)

    def _fill(self, states: Sequence[GrammarState | None], masks: Tensor) -> None:
        """Write the mask of each state. A mask without a state forbids all ids."""
        pending = [(state, i) for i, state in enumerate(states) if state is not None]
        while pending:
            targets = [(state.matcher, i) for state, i in pending if state.masked_by_grammar]
            if targets:
                words_bytes = masks.shape[1] * 4
                self._library.unsafe_compute_mask_ptr(
                    targets, masks.data_ptr(), words_bytes, len(masks)
                )
            tokenizer = self._tokenizer.result()
            pending = [(state, i) for state, i in pending if state.renew(tokenizer)]
        for state, mask in zip(states, masks.numpy(), strict=True):
            if state is None:
                mask[:] = 0
            else:
                state.complete(mask)

    def _after_drafts(
        self, positions: Sequence["_Position"], masks: NDArray[np.int32]
    ) -> list["_Position"]:
        """Return the positions that follow an allowed draft, with states that have followed it."""
        after = []
        followed = []
        for (state, row, drafts), mask in zip(positions, masks, strict=True):
            if state is not None and drafts and allows(mask, drafts[0]):
                follower = state.before(drafts[0])
                after.append(_Position(follower, row + 1, drafts[1:]))
                if follower is not None:
                    followed.append((follower, drafts[:1]))
        self._follow(followed)
        return after


class _Position(NamedTuple):
    """A position of an output that a step samples.

    state   has followed all tokens before the position; None: the output ends before it.
    row     the row of its logits.
    drafts  the draft of this position and those after it.
    """

    state: GrammarState | None
    row: int
    drafts: list[int]


class _NewTokens:
    """The newest tokens and the drafts of some requests, on their way to the host."""

    def __init__(self, reqs: Sequence[EditedReq], step: ProcessingStep) -> None:
        """Queue the copy on the current stream, before the forward of `step`."""
        self._reqs = reqs
        indices = [req.index for req in reqs]
        self._most_drafts = (step.batch.lengths[indices] - 1).tolist()
        arrays = {
            "rows": step.batch.rows[indices].astype(np.int64),
            "newest": np.array([req.position - 1 for req in reqs]),
            "requests": step.places[indices] // step.batch.width,
        }
        pool, width = step.token_pool, step.batch.width
        at = upload(arrays, pool.device)
        rows = at["rows"]
        if step.drafts is None:
            copied = pool[rows, at["newest"]]
        else:
            newest = step.drafts.cached[rows]
            window = torch.arange(-MAX_DRAFTS, width, device=pool.device) + newest.unsqueeze(1)
            ids = pool[rows.unsqueeze(1), window.clamp(0, pool.shape[1] - 1)]
            found = step.drafts.found[at["requests"]]
            copied = torch.cat((newest.unsqueeze(1), found.unsqueeze(1), ids), dim=1)
        self._ids = copied.to("cpu", non_blocking=True)
        self._drafting = step.drafts is not None
        self._copied: torch.cuda.Event | None = None
        if pool.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> dict[int, tuple[int, list[int], list[int]]]:
        """Return position, newest tokens and drafts by the index of the request in the batch.

        The position is that of the next token. The newest tokens end directly before it, and
        include all tokens of the previous step.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not self._drafting:
            pairs = zip(self._reqs, self._ids.tolist(), strict=True)
            return {req.index: (req.position, [token], []) for req, token in pairs}
        copied = {}
        for req, most, row in zip(self._reqs, self._most_drafts, self._ids.tolist(), strict=True):
            newest, found, *ids = row
            tokens, drafts = ids[: MAX_DRAFTS + 1], ids[MAX_DRAFTS + 1 :]
            copied[req.index] = newest + 1, tokens, drafts[: min(found, most)]
        return copied


def _compile(tokenizer: Future[LLTokenizer], source: str) -> Compiled:
    began_s = time.perf_counter()
    try:
        loaded = tokenizer.result()
    except ConfigError as error:
        raise Unsupported(str(error)) from None
    return Compiled(compile_grammar(loaded, source), time.perf_counter() - began_s)
