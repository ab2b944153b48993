"""`GrammarProcessor`: the logits processor that keeps outputs inside their grammars."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from llguidance import LLTokenizer

from minisgl.core import ConfigError, Grammar, SamplingParams, Unsupported
from minisgl.core.batch import EditedReq
from minisgl.core.config import MAX_DRAFTS
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.logits_processing import MaskedRows, ProcessingStep, TokenMask, upload
from minisgl.message.stats import ConstraintTotals
from minisgl.models.config import load_model_spec
from minisgl.structured.compile_threads import CompileThreads, raise_stack_limit
from minisgl.structured.library import compile_grammar, load_tokenizer
from minisgl.structured.masks import MaskComputer, Position
from minisgl.structured.matcher import Compiled, GrammarState
from minisgl.utils.process import usable_cores

MAX_COMPILE_THREADS = 3


def with_grammars(model_path: str, extensions: Extensions = DEFAULT_EXTENSIONS) -> Extensions:
    """Return `extensions` with a GrammarProcessor for this model folder. Raises ConfigError."""
    processor = GrammarProcessor(model_path, load_model_spec(model_path).eos_token_ids)
    processors = (*extensions.logits_processors, processor)
    return replace(extensions, logits_processors=processors, constraint_totals=processor.totals)


class GrammarProcessor:
    """Computes the token masks of the requests with a grammar.

    Threads compile grammars (CompileThreads), and compute the masks that a step withholds
    (MaskComputer): two on a machine of two cores, otherwise three. One of them reads the model's
    tokenizer at the start. The other masks of a step are computed on the host while the device
    computes its forward.

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
        self._threads = CompileThreads(max(2, min(usable_cores(), MAX_COMPILE_THREADS)))
        load = partial(load_tokenizer, model_path, eos_token_ids)
        self._tokenizer = self._threads.submit("", load)
        self._masks = MaskComputer(self._tokenizer)

    def open(self, params: SamplingParams) -> GrammarState | None:
        """As LogitsProcessor.open."""
        grammar = params.grammar
        if grammar is None:
            return None
        assert isinstance(grammar, Grammar), "the front end must compile grammars; this is a bug"
        function = partial(_compile, self._tokenizer, grammar)
        common = self._eos_token_ids, self.totals, self._prepare_mask, self.forces_tokens
        return GrammarState(params, grammar, partial(self._threads.run, function), *common)

    def prepare(
        self, reqs: Sequence[tuple[EditedReq, GrammarState]], step: ProcessingStep
    ) -> TokenMask:
        """As LogitsProcessor.prepare. Queues the copy of new tokens and drafts to the host."""
        sampled = [req for req, _ in reqs if req.history is None]
        newest = _NewTokens(sampled, step) if sampled else None

        def compute() -> MaskedRows:
            found = {} if newest is None else newest.wait()
            failed_rows = step.failed_rows() if sampled else ()
            began_s = time.perf_counter()
            clients: dict[str, list[Position]] = {}
            for req, state in reqs:
                state.drafting = step.drafts is not None
                drafts: list[int] = []
                if req.history is not None:
                    count = state.unseen(req.position, req.prompt_len)
                    unseen: list[int] = req.history[req.position - count :].tolist()
                elif step.batch.rows[req.index] in failed_rows:
                    continue  # the previous step gave no token, so the result is dropped
                else:
                    position, tokens, drafts = found[req.index]
                    unseen = tokens[len(tokens) - state.unseen(position, req.prompt_len) :]
                place = int(step.places[req.index])
                clients.setdefault(state.client, []).append(Position(state, place, drafts, unseen))
            masks = self._masks.compute(clients, step.token_pool.device)
            self.totals.masks += len(masks.rows)
            self.totals.mask_seconds += time.perf_counter() - began_s
            if masks.withheld is not None:
                self.totals.withheld += len(masks.withheld)
            return masks

        return TokenMask(compute)

    def _prepare_mask(self, state: GrammarState, tokens: list[int]) -> Future[float]:
        function = partial(state.compute_ahead, tokens, self._tokenizer.result())
        return self._threads.submit(state.client, function)


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


def _compile(tokenizer: Future[LLTokenizer], grammar: Grammar) -> Compiled:
    began_s = time.perf_counter()
    try:
        loaded = tokenizer.result()
    except ConfigError as error:
        raise Unsupported(str(error)) from None
    return Compiled(compile_grammar(loaded, grammar), time.perf_counter() - began_s)
