"""Scheduler and engine together give the tokens of transformers, for any split into steps.

Prefix cache, chunk size, overlap, preemption and the dtype of the KV cache are varied pairwise.
Every run asserts that its cache hits, chunks, overlapped steps and preemptions took place. Free
pages hold NaN.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch, DraftLengths, WindowLayers
from minisgl.engine import Engine, memory
from minisgl.message.messages import AddReq, PromptImage
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.models import VOCAB_SIZE, transformers_greedy
from tests.unit.scheduler.integrity import check_held, check_scheduler, windows_of

ModelPath = Callable[[str], str]
OUTPUT_TOKENS = 13
UNLIMITED = 8192


@dataclass(frozen=True)
class Case:
    """One point of the pairwise product. crowded: the pool is too small to avoid preemption.

    speculative: as in EngineConfig, for runs with drafts.
    """

    chunk: int
    cache_type: str
    overlap: bool
    crowded: bool
    page_size: int = 4
    kv: str = "auto"
    speculative: str | None = None

    @property
    def waves(self) -> int:
        """The second wave finds the prefixes of the first one cached."""
        return 2 if self.cache_type == "radix" else 1

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "plain"
        crowd = "-crowded" if self.crowded else ""
        kv = "-fp8" if self.kv == "fp8" else ""
        return f"chunk{self.chunk}-{self.cache_type}-{overlap}{crowd}-page{self.page_size}{kv}"


# Every pair of values occurs, except chunk 1 with crowded: with chunks of one token, a request ends
# before the next one decodes, so no request is preempted.
CASES = [
    Case(1, "radix", overlap=True, crowded=False),
    Case(1, "naive", overlap=False, crowded=False),
    Case(7, "radix", overlap=True, crowded=True, page_size=1),
    Case(7, "naive", overlap=False, crowded=True),
    Case(64, "radix", overlap=False, crowded=True),
    Case(64, "naive", overlap=True, crowded=False, page_size=16),
    Case(UNLIMITED, "radix", overlap=True, crowded=True),
    Case(UNLIMITED, "naive", overlap=True, crowded=True, page_size=2),
    Case(UNLIMITED, "radix", overlap=False, crowded=False, page_size=8),
]
FP8 = (1, 2, 5, 8)  # each chunk, each kind of prefix cache, overlap and preemption occurs here
# These families share the scheduler and the caches with qwen3, which runs all cases: tests of the
# engine split the prompts of each family. A family therefore runs one case, in turn one with chunks
# of 7 or 64, and pages of 1, 4 or 16. Three families stand for the kinds of window memory, and run
# all of them: windows in all layers, windows beside full attention, and pools of two shapes with
# layers that share keys. Without shared keys, the pools of two shapes run one of them.
FULL_ATTENTION = [
    "llama-llama3-tied",
    "qwen2-yarn-tied",
    "qwen2-moe",
    "phi3-partial-tied",
    "mistral3-vision",
    "olmo2",
]
# Their attention is that of a family above.
LIKE_OTHERS = [
    "mistral",
    "phi3-longrope",
    "ministral3-yarn",
    "granite-biases-tied",
    "smollm3",
    "seed-oss",
    "qwen3-vl-moe",
    "glm4-moe",
    "minimax-m2",
]
WINDOWS = [
    "exaone4-windows",
    "qwen2-window",
    "gemma2",
    "gemma3-linear",
    "olmo3-yarn-tied",
    "gpt-oss",
    "muse-glimmer",
]
WINDOW_MEMORIES = [
    "mistral-window",
    "exaone4-short-windows",
    "gemma4-shared-experts",
]
OTHERS = (2, 4, 5)
PAIRS = [
    *(
        ("qwen3", replace(case, kv="fp8") if index in FP8 else case)
        for index, case in enumerate(CASES)
    ),
    ("qwen3-moe", CASES[2]),
    ("qwen3-moe", replace(CASES[4], kv="fp8")),
    ("qwen3-moe", replace(CASES[7], kv="fp8")),
    *(
        (family, CASES[index])
        for family, index in zip([*FULL_ATTENTION, *WINDOWS], cycle(OTHERS), strict=False)
    ),
    *(
        pytest.param(family, CASES[index], marks=pytest.mark.proof)
        for family, index in zip(LIKE_OTHERS, cycle(OTHERS), strict=False)
    ),
    *((family, CASES[index]) for family in WINDOW_MEMORIES for index in OTHERS),
    ("gemma4-experts", CASES[4]),
    *(pytest.param("gemma4-experts", CASES[i], marks=pytest.mark.proof) for i in (2, 5)),
    ("exaone4-short-windows", CASES[0]),
]


def prompts() -> list[list[int]]:
    """Six prompts of 20 to 90 tokens; most share a beginning with another."""
    rng = np.random.default_rng(7)
    stem = rng.integers(3, VOCAB_SIZE, 70).tolist()
    lengths = [(70, 20), (33, 17), (70, 3), (0, 25), (16, 30), (33, 17)]
    return [stem[:shared] + rng.integers(3, VOCAB_SIZE, own).tolist() for shared, own in lengths]


class Recorder:
    """Passes steps on to the engine and records them.

    Before each step it fills the pages that no request and no cached prefix has with NaN. The
    engine runs a step at its launch, so no step in flight reads them.

    predicted: number of tokens that equal a draft from a prediction.
    """

    scheduler: Scheduler

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_pages, self.page_size = engine.num_pages, engine.page_size
        self.max_running_reqs, self.max_seq_len = engine.max_running_reqs, engine.max_seq_len
        self.window, self.snapshot_pages = engine.window, engine.snapshot_pages
        self.copier, self.images = engine.copier, engine.images
        self.batches: list[Batch] = []
        self.predicted = 0

    def launch(self, batch: Batch) -> object:
        self.batches.append(batch)
        memory, pools = self.scheduler.memory, self._engine._launcher.runner.pools
        fenced = [memory.pool, *(windows.pages.pool for windows in windows_of(memory))]
        for ids, pool in zip(fenced, pools, strict=True):
            if pool.spec.fp8:
                continue
            with torch.inference_mode():  # some tests allocate the pools in this mode
                pool._storage[:, :, np.flatnonzero(~ids.allocated)] = torch.nan
        return self._engine.launch(batch)


def few_window_pages(config: EngineConfig, num_pages: int, window: int, chunk: int) -> int:
    return 3 * WindowLayers(window, 0).reserve(config.page_size)


def run(
    path: str,
    case: Case,
    samplings: list[SamplingParams],
    drafts: DraftLengths | None = None,
    predictions: list[list[int]] | None = None,
    texts: list[list[int]] | None = None,
    images: list[tuple[PromptImage, ...]] | None = None,
    **engine_settings: object,
) -> tuple[list[list[int]], Scheduler, Recorder]:
    """Run the waves of the prompts.

    samplings: one for each prompt, or one for all. drafts: None for a run without drafts.
    predictions: one for each request of all waves. texts, images: the prompts; None: prompts().
    """
    texts = texts or prompts()
    # The largest request has 90 + 13 tokens and must fit. 120 tokens leave no room for a second.
    tokens = 120 if case.crowded else 1024
    pages = -(-tokens // case.page_size)
    with contextlib.ExitStack() as stack:
        if case.crowded:  # the windows of three requests
            stack.enter_context(patch.object(memory, "window_pages_for", few_window_pages))
        settings = {"page_size": case.page_size, "kv_cache_dtype": case.kv}
        settings |= {"speculative": case.speculative} | engine_settings
        engine = make_engine(path, drafts=drafts, num_pages=pages, **settings)
    recorder = Recorder(engine)
    inbox, outbox = LocalInbox(), deque()
    scheduler = Scheduler(
        recorder,  # type: ignore[arg-type]
        SchedulerConfig(
            prefill_budget_tokens=case.chunk,
            target_step_ms=None,
            cache_type=case.cache_type,
            overlap=case.overlap,
        ),
        vocab_size=engine.facts().vocab_size,
        eos_token_ids=engine.facts().eos_token_ids,
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    recorder.scheduler = scheduler
    outputs: dict[int, list[int]] = {}
    for wave in range(case.waves):
        for index, prompt in enumerate(texts):
            uid = wave * len(texts) + index
            outputs[uid] = []
            ids = np.array(prompt, dtype="<i4").tobytes()
            asked = samplings[index % len(samplings)]
            predicted = np.array(predictions[uid] if predictions else [], dtype="<i4").tobytes()
            message = AddReq(
                uid=uid,
                token_ids=ids,
                sampling=asked,
                prediction=predicted,
                images=images[index] if images else (),
            )
            inbox.messages.append(message)
        while inbox.messages or not scheduler.idle:
            scheduler.iterate()
            check_scheduler(scheduler)
            check_held(scheduler, recorder.batches[-1])
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            outputs[uid].append(token)
    recorder.predicted = sum(count for output in outbox for _, count in output.predicted)
    engine.close()
    return [outputs[uid] for uid in sorted(outputs)], scheduler, recorder


def prove(case: Case, scheduler: Scheduler, recorder: Recorder) -> None:
    """Assert that the run had exactly the events of its case, such as preemptions."""
    totals = scheduler.totals
    assert (totals.cached_tokens_total > 0) == (case.cache_type == "radix")
    assert (totals.preemptions_total > 0) == case.crowded
    assert (totals.overlapped_steps_total > 0) == case.overlap
    partial = [b for b in recorder.batches if not b.samples.all()]
    assert bool(partial) == (case.chunk < UNLIMITED)
    mixed = [b for b in recorder.batches if b.num_decode and len(b.chunk_ids)]
    assert mixed, "some step must carry decode tokens and a chunk"


@pytest.mark.parametrize(("family", "case"), PAIRS, ids=str)
def test_greedy_tokens_equal_those_of_transformers(
    family: str, case: Case, model_path: ModelPath
) -> None:
    path = model_path(family)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    outputs, scheduler, recorder = run(path, case, [sampling])
    prove(case, scheduler, recorder)
    expected = [
        transformers_greedy(path, prompt, OUTPUT_TOKENS, case.kv, guess=found)
        for prompt, found in zip(prompts(), outputs, strict=False)
    ]
    assert outputs == expected * case.waves


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_seeded_tokens_do_not_depend_on_other_requests_in_the_batch(
    case: Case, model_path: ModelPath
) -> None:
    path = model_path("qwen3")
    sampling = SamplingParams(
        temperature=1.3, top_k=40, top_p=0.95, seed=11, max_tokens=OUTPUT_TOKENS, ignore_eos=True
    )
    plain = Case(UNLIMITED, "naive", overlap=False, crowded=False)
    alone, _, _ = run(path, plain, [sampling])
    outputs, scheduler, recorder = run(path, case, [sampling])
    prove(case, scheduler, recorder)
    assert outputs == alone * case.waves
    assert len({tuple(tokens) for tokens in outputs}) > 3, "sampling must not be degenerate"
