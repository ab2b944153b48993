"""Batches made by hand: drives an Engine without a scheduler, and keeps its page table."""

from dataclasses import dataclass, replace

import numpy as np

from minisgl.attention.base import AttentionBackend
from minisgl.core import EngineConfig, SamplingParams
from minisgl.core.batch import (
    Batch,
    DraftLengths,
    Int32Array,
    LogprobsRequest,
    PageUpdates,
    StateCopies,
    StepResult,
)
from minisgl.core.columns import sampling_arrays
from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.drafts import with_head, with_ngrams
from minisgl.engine import Engine, Extensions
from minisgl.quantization import with_quantizations

__all__ = ["GREEDY", "Driver", "Work", "generate", "logprobs_of", "make_engine", "with_drafts"]

GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass
class Work:
    """One request's part of a step: a chunk of `ids`, or a decode token with drafts after it."""

    row: int
    start: int
    ids: list[int] | None = None
    samples: bool = True
    sampling: SamplingParams = GREEDY
    drafts: int = 0

    @property
    def length(self) -> int:
        return 1 + self.drafts if self.ids is None else len(self.ids)


def make_engine(
    path: str,
    comm: Communicator | None = None,
    drafts: DraftLengths | None = None,
    attention_backends: tuple[type[AttentionBackend], ...] = (),
    extensions: Extensions | None = None,
    **overrides: object,
) -> Engine:
    """Return a float32 CPU engine with 64 pages of 4 tokens and 6 rows, except for `overrides`.

    drafts: the extension of the engine; None: an engine without drafts. They are those of a draft
    head with speculative="mtp". attention_backends: further ones (Extensions). extensions: in place
    of those of with_drafts.
    """
    settings: dict[str, object] = {
        "model_path": path,
        "device": "cpu",
        "page_size": 4,
        "num_pages": 64,
        "max_running_reqs": 6,
    }
    comm = comm or SingleCommunicator()
    config = EngineConfig(**settings | overrides)  # type: ignore[arg-type]
    extensions = extensions or with_drafts(drafts, config.speculative)
    extensions = replace(extensions, attention_backends=attention_backends)
    return Engine(config, comm, extensions=extensions)


def with_drafts(drafts: DraftLengths | None, method: str | None = None) -> Extensions:
    extensions, added = with_quantizations(), with_head if method == "mtp" else with_ngrams
    return extensions if drafts is None else added(lambda rows: drafts, extensions)


def logprobs_of(*work: Work, prompts: bool) -> tuple[LogprobsRequest, ...]:
    """Report 16 likely tokens with each sampled token; `prompts`: one with each chunk token."""
    found = []
    for index, item in enumerate(work):
        length = item.length if prompts and item.ids is not None else 0
        targets = np.zeros(length, dtype=np.int32)
        found.append(LogprobsRequest(index, 16, 1 if length else -1, targets))
    return tuple(found)


class Driver:
    """Gives each row scattered pages as it grows. Rows can share pages."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step_id = 0
        self.pages: dict[int, list[int]] = {}
        # In random order, so that no test passes only because the pages of a row are neighbours.
        order = np.random.default_rng(0).permutation(engine.num_pages)
        self.free = [int(page) for page in order]

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let row `target` begin with the whole pages of the first `tokens` of row `source`."""
        assert tokens % self.engine.page_size == 0
        self.pages[target] = self.pages[source][: tokens // self.engine.page_size]

    def snapshot(self) -> Int32Array:
        """Return free pages for a copy of the states of one row, int32 [1, P]."""
        pages = [self.free.pop() for _ in range(self.engine.snapshot_pages)]
        return np.array([pages], dtype=np.int32)

    def clear_tokens(self) -> None:
        """Set the input of each decode to id 0, until a request samples a token.

        The warm-up samples tokens too. Their positions depend on the backends and on the graphs.
        """
        with self.engine._start.on_stream():
            self.engine._launcher.runner.token_pool.zero_()

    def step(
        self,
        *work: Work,
        logprobs: tuple[LogprobsRequest, ...] = (),
        states: StateCopies | None = None,
        drafts: int = 0,
    ) -> StepResult:
        """Run one batch. The decode requests must come first. drafts: Batch.next_drafts."""
        updates: list[tuple[int, int, int]] = []
        for item in work:
            pages = self.pages.setdefault(item.row, [])
            fresh = -(-(item.start + item.length) // self.engine.page_size) - len(pages)
            pages.extend(self.free.pop() for _ in range(fresh))
            updates += [(item.row, col, page) for col, page in enumerate(pages)]
            if self.engine.window is not None:
                row = item.row + self.engine.max_running_reqs + 1
                updates += [(row, col, page) for col, page in enumerate(pages)]
        table = np.array(updates, dtype=np.int32)
        batch = Batch(
            step_id=self.step_id,
            num_decode=sum(item.ids is None for item in work),
            rows=np.array([item.row for item in work], dtype=np.int32),
            start=np.array([item.start for item in work], dtype=np.int32),
            lengths=np.array([item.length for item in work], dtype=np.int32),
            samples=np.array([item.samples for item in work]),
            chunk_ids=np.array([i for item in work for i in item.ids or []], dtype=np.int32),
            page_updates=PageUpdates(*table.T.copy()),
            sampling=sampling_arrays([item.sampling for item in work]),
            logprobs=logprobs,
            states=states,
            next_drafts=drafts,
        )
        self.step_id += 1
        return self.engine.launch(batch).wait()

    def generate(
        self, row: int, prompt: list[int], n: int, chunk: int = 0, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """Prefill in chunks of `chunk` (0: all at once), then decode up to n output tokens."""
        size = chunk or len(prompt)
        result: StepResult | None = None
        for start in range(0, len(prompt), size):
            ids = prompt[start : start + size]
            last = start + size >= len(prompt)
            result = self.step(Work(row, start, ids, last, sampling))
        assert result is not None
        tokens = [int(result.tokens[0, 0])]
        while len(tokens) < n:
            start = len(prompt) + len(tokens) - 1
            tokens.append(int(self.step(Work(row, start, sampling=sampling)).tokens[0, 0]))
        return tokens


def generate(comm: Communicator, path: str, prompt: list[int], n: int) -> list[int]:
    """Return the n tokens of greedy decoding by an engine on this rank."""
    return Driver(make_engine(path, comm)).generate(0, prompt, n)
