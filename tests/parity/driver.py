"""Hand-made batches: a small page-table clerk that drives an Engine without a scheduler."""

from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Batch, EngineConfig, SamplingArrays, StepExtras, StepResult
from minisgl.distributed import Communicator, SingleCommunicator
from minisgl.engine import Engine

__all__ = ["Driver", "Sampling", "Work", "logprobs_of", "make_engine"]


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass
class Work:
    """One req's share of a step: `ids` None decodes, else they are a chunk."""

    row: int
    start: int
    ids: list[int] | None = None
    samples: bool = True
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def length(self) -> int:
        return 1 if self.ids is None else len(self.ids)


def make_engine(path: str, comm: Communicator | None = None, **overrides: object) -> Engine:
    """A float32 CPU engine with 64 pages of 4 tokens and 6 rows, unless told otherwise."""
    settings: dict[str, object] = {
        "model_path": path,
        "device": "cpu",
        "page_size": 4,
        "num_pages": 64,
        "max_running_reqs": 6,
    }
    comm = comm or SingleCommunicator()
    return Engine(EngineConfig(**settings | overrides), comm)  # type: ignore[arg-type]


def logprobs_of(*work: Work, prompts: bool) -> StepExtras:
    """The 16 best of each sampled token; of the prompt tokens of each chunk as well, or not."""
    chunks = [prompts and item.ids is not None for item in work]
    lengths = [item.length for item, wanted in zip(work, chunks, strict=True) if wanted]
    return StepExtras(
        edits=None,
        logprobs=np.full(len(work), 16, dtype=np.int32),
        prompt_logprobs=np.where(chunks, 1, -1).astype(np.int32),
        prompt_targets=np.zeros(sum(lengths), dtype=np.int32),
    )


class Driver:
    """Gives each row scattered pages as it grows; pages can be shared between rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step_id = 0
        self.pages: dict[int, list[int]] = {}
        # Far apart and descending, so that nothing works by pages being neighbours.
        order = np.random.default_rng(0).permutation(engine.num_pages)
        self.free = [int(page) for page in order]

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let row `target` begin with the whole pages of the first `tokens` of row `source`."""
        assert tokens % self.engine.page_size == 0
        self.pages[target] = self.pages[source][: tokens // self.engine.page_size]

    def step(self, *work: Work, extras: StepExtras | None = None) -> StepResult:
        """Run one batch; decode works must come first."""
        updates: list[tuple[int, int, int]] = []
        for item in work:
            pages = self.pages.setdefault(item.row, [])
            fresh = -(-(item.start + item.length) // self.engine.page_size) - len(pages)
            pages.extend(self.free.pop() for _ in range(fresh))
            updates += [(item.row, col, page) for col, page in enumerate(pages)]
        table = np.array(updates, dtype=np.int32)
        asked = [item.sampling for item in work]
        batch = Batch(
            step_id=self.step_id,
            num_decode=sum(item.ids is None for item in work),
            rows=np.array([item.row for item in work], dtype=np.int32),
            start=np.array([item.start for item in work], dtype=np.int32),
            lengths=np.array([item.length for item in work], dtype=np.int32),
            samples=np.array([item.samples for item in work]),
            chunk_ids=np.array([i for item in work for i in item.ids or []], dtype=np.int32),
            page_rows=table[:, 0].copy(),
            page_cols=table[:, 1].copy(),
            page_ids=table[:, 2].copy(),
            sampling=SamplingArrays(
                temperature=np.array([s.temperature for s in asked], dtype=np.float32),
                top_k=np.array([s.top_k for s in asked], dtype=np.int32),
                top_p=np.array([s.top_p for s in asked], dtype=np.float32),
                min_p=np.array([s.min_p for s in asked], dtype=np.float32),
                seed=np.array([s.seed for s in asked], dtype=np.int64),
            ),
            extras=extras,
        )
        self.step_id += 1
        return self.engine.launch(batch).wait()

    def generate(
        self, row: int, prompt: list[int], n: int, chunk: int = 0, sampling: Sampling | None = None
    ) -> list[int]:
        """Prefill in chunks of `chunk` (0: all at once), then decode until n tokens are there."""
        sampling = sampling or Sampling()
        size = chunk or len(prompt)
        result: StepResult | None = None
        for start in range(0, len(prompt), size):
            ids = prompt[start : start + size]
            last = start + size >= len(prompt)
            result = self.step(Work(row, start, ids, last, sampling))
        assert result is not None
        tokens = [int(result.tokens[0])]
        while len(tokens) < n:
            start = len(prompt) + len(tokens) - 1
            tokens.append(int(self.step(Work(row, start, sampling=sampling)).tokens[0]))
        return tokens
