"""`GrammarProcessor`: the logits processor that keeps outputs inside their grammars."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from llguidance import LLExecutor, LLTokenizer
from torch import Tensor

from minisgl.core import ConfigError, Grammar, SamplingParams, Unsupported
from minisgl.core.batch import EditedReq
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.logits_processing import ProcessingStep, TokenMask, upload
from minisgl.message.messages import ConstraintTotals
from minisgl.models.config import load_model_config
from minisgl.structured.library import compile_grammar, load_tokenizer
from minisgl.structured.matcher import Compiled, GrammarState

COMPILE_THREADS = 2
MAX_MASK_THREADS = 8


def with_grammars(model_path: str, extensions: Extensions = DEFAULT_EXTENSIONS) -> Extensions:
    """Return `extensions` with a GrammarProcessor for this model folder. Raises ConfigError."""
    processor = GrammarProcessor(model_path, load_model_config(model_path).eos_token_ids)
    processors = (*extensions.logits_processors, processor)
    return replace(extensions, logits_processors=processors, constraint_totals=processor.totals)


class GrammarProcessor:
    """Computes the token masks of the requests with a grammar.

    A thread reads the model's tokenizer at the start, and two threads compile grammars. The masks
    of a step are computed on the host while the device computes the step's forward.

    totals         the counters of all requests.
    forces_tokens  True: the scheduler appends forced tokens. False: a step samples every token of
                   the requests that are opened from now on. A benchmark compares both values.
    """

    forces_tokens = True

    def __init__(self, model_path: str, eos_token_ids: tuple[int, ...]) -> None:
        """Start to read the tokenizer. eos_token_ids: the EOS ids of the model."""
        self.totals = ConstraintTotals()
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._tokenizer = self._threads.submit(load_tokenizer, model_path, eos_token_ids)
        cores = os.cpu_count() or 1
        self._library = LLExecutor(max(1, min(cores // 2, MAX_MASK_THREADS)))

    def open(self, params: SamplingParams) -> GrammarState | None:
        """As LogitsProcessor.open. Starts to compile the grammar."""
        grammar = params.grammar
        if grammar is None:
            return None
        assert isinstance(grammar, Grammar), "the front end must compile grammars: this is a bug"
        compiled = self._threads.submit(_compile, self._tokenizer, grammar.source)
        return GrammarState(
            params, grammar, compiled, self._eos_token_ids, self.totals, self.forces_tokens
        )

    def prepare(
        self, reqs: Sequence[tuple[EditedReq, GrammarState]], step: ProcessingStep
    ) -> TokenMask:
        """As LogitsProcessor.prepare. Queues the copy of the newest tokens to the host."""
        unseen = [state.unseen(req.position, req.prompt_len) for req, state in reqs]
        sampled = [
            req
            for (req, _), count in zip(reqs, unseen, strict=True)
            if count and req.history is None
        ]
        newest = _NewestTokens(sampled, step) if sampled else None

        def compute() -> tuple[Tensor, Tensor]:
            tokens = {} if newest is None else newest.wait()
            began_s = time.perf_counter()
            consumed = []
            for (req, state), count in zip(reqs, unseen, strict=True):
                if count and req.history is not None:
                    state.follow(req.history[-count:].tolist())
                elif count and state.count(tokens[req.index]):
                    consumed.append((state.matcher, tokens[req.index]))
            if consumed:
                self._library.consume_token_par(consumed)
            sent = self._compute_masks(reqs, step)
            self.totals.masks += len(reqs)
            self.totals.mask_seconds += time.perf_counter() - began_s
            return sent

        return TokenMask(compute)

    def _compute_masks(
        self, reqs: Sequence[tuple[EditedReq, GrammarState]], step: ProcessingStep
    ) -> tuple[Tensor, Tensor]:
        """Return the result of TokenMask.compute for states that have followed every token."""
        device = step.token_pool.device
        count, words = len(reqs), -(-self._tokenizer.result().vocab_size // 32)
        # One transfer sends all masks, and after them all rows.
        buffer = torch.empty(
            count * (words + 1), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        masks = buffer[: count * words].view(count, words)
        buffer[count * words :] = torch.from_numpy(step.places[[req.index for req, _ in reqs]])
        targets = [
            (state.matcher, i) for i, (_, state) in enumerate(reqs) if state.masked_by_grammar
        ]
        if targets:
            self._library.unsafe_compute_mask_ptr(targets, masks.data_ptr(), words * 4, count)
        for (_, state), mask in zip(reqs, masks.numpy(), strict=True):
            state.complete(mask)
        sent = buffer.to(device, non_blocking=True)
        return sent[count * words :], sent[: count * words].view(count, words)


class _NewestTokens:
    """The newest token of some requests, on its way from the token pool to the host."""

    def __init__(self, reqs: Sequence[EditedReq], step: ProcessingStep) -> None:
        """Queue the copy on the current stream, before the forward of `step`."""
        self._indices = [req.index for req in reqs]
        device = step.token_pool.device
        arrays = {
            "rows": step.batch.rows[self._indices].astype(np.int64),
            "positions": np.array([req.position - 1 for req in reqs]),
        }
        at = upload(arrays, device)
        self._ids = step.token_pool[at["rows"], at["positions"]].to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> dict[int, int]:
        """Return the tokens by the index of their request in the batch."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._indices, self._ids.tolist(), strict=True))


def _compile(tokenizer: Future[LLTokenizer], source: str) -> Compiled:
    began_s = time.perf_counter()
    try:
        loaded = tokenizer.result()
    except ConfigError as error:
        raise Unsupported(str(error)) from None
    return Compiled(compile_grammar(loaded, source), time.perf_counter() - began_s)
