"""A program adds stages to the steps of an engine, without changing the package.

The same stages run in eager steps and in (emulated) CUDA graphs.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch
from minisgl.engine import (
    DEFAULT_EXTENSIONS,
    Extensions,
    ModelRunner,
    Stage,
    StepColumns,
    StepTensors,
)
from minisgl.engine.step import GraphStep, StepLauncher
from minisgl.engine.step_tensors import Logits
from minisgl.message.messages import AddReq, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.models import VOCAB_SIZE, build_model
from tests.unit.engine.emulated_graphs import emulate_decode_graphs
from tests.unit.scheduler.drafts import ChangingDrafts

TOKENS = 20
PROMPTS = [[5, 6, 7, 8], [50, 40, 30], [9] * 20, [100, 101]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", Path(tmp_path_factory.mktemp("models")))


@pytest.fixture(params=[False, True], ids=["eager", "graphs"], autouse=True)
def by_graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    picked = emulate_decode_graphs(monkeypatch) if request.param else []
    yield
    assert request.param == any(isinstance(step, GraphStep) for _, step in picked)


def generate(path: str, extensions: Extensions) -> list[list[int]]:
    """Run the prompts at the same time; return their tokens. Row i belongs to prompt i."""
    engine = make_engine(path, extensions=extensions)
    inbox, outbox = LocalInbox(), deque[StepOutput]()
    scheduler = Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None, prefill_budget_tokens=8, cache_type="naive"),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=extensions,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for uid, prompt in enumerate(PROMPTS):
        ids = np.array(prompt, dtype="<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            tokens[uid].append(token)
    return tokens


class Forwarded(Stage):
    """Adds up the tokens that each row forwards, times a factor that the host sends each step.

    sums   int32 [rows] on the device.
    drawn  the tokens of each row, as `after` sees them.
    """

    def __init__(self, runner: ModelRunner) -> None:
        rows = len(runner.token_pool)
        self.sums = torch.zeros(rows, dtype=torch.int32)
        self.factor = torch.zeros(1, dtype=torch.int32)
        self.drawn: dict[int, list[int]] = {row: [] for row in range(rows)}

    def before(self, x: StepTensors) -> None:
        if not self.factor:  # the first step; a capture has run the stage before
            self.sums.zero_()
        self.factor.fill_(2 if len(x.batch.chunk_ids) else 1)

    def captured(self, columns: StepColumns) -> None:
        lengths = columns.forwarded_lengths()
        self.sums.index_add_(0, columns.views.rows.long(), lengths * self.factor)

    def after(self, x: StepTensors, out: Logits, tokens: torch.Tensor) -> None:
        for index, place in enumerate(x.places().tolist()):
            if x.batch.samples[index]:
                self.drawn[int(x.batch.rows[index])].append(int(tokens[0, place]))


def test_a_stage_sees_each_step_once_before_within_and_after_the_forward(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(path, DEFAULT_EXTENSIONS)
    launched: list[Batch] = []
    launch = StepLauncher.launch

    def record(self: StepLauncher, batch: Batch) -> object:
        launched.append(batch)
        return launch(self, batch)

    monkeypatch.setattr(StepLauncher, "launch", record)
    made = list[Forwarded]()

    def make(runner: ModelRunner) -> Forwarded:
        made.append(Forwarded(runner))
        return made[-1]

    assert generate(path, replace(DEFAULT_EXTENSIONS, stages=(make,))) == plain
    expected = [0] * len(PROMPTS)
    for batch in launched:
        for row, length in zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True):
            expected[row] += length * (2 if len(batch.chunk_ids) else 1)
    assert made[-1].sums[: len(PROMPTS)].tolist() == expected
    assert [made[-1].drawn[row] for row in range(len(PROMPTS))] == plain


class DraftsAfterTheSampler(Stage):
    """Writes the drafts of the next step when this step has its tokens, as a draft model does.

    It knows the answers: `sequences` are prompts with their outputs.
    """

    def __init__(self, runner: ModelRunner, sequences: list[list[int]]) -> None:
        assert runner.drafts is not None
        self.token_pool, self.drafts, self.sequences = runner.token_pool, runner.drafts, sequences
        self.of_row: dict[int, list[int]] = {}

    def before(self, x: StepTensors) -> None:
        for row, tokens, _ in x.batch.histories:
            prompt = tokens.tolist()
            self.of_row[row] = next(s for s in self.sequences if s[: len(prompt)] == prompt)

    def captured(self, columns: StepColumns) -> None:
        decode = slice(columns.num_decode)
        self.drafts.found.zero_()
        self.drafts.found[decode] = columns.views.lengths[decode]

    def after(self, x: StepTensors, out: Logits, tokens: torch.Tensor) -> None:
        for row, sequence in self.of_row.items():
            first = int(self.drafts.cached[row]) + 1
            follows = sequence[first : first + 8]
            self.token_pool[row, first : first + len(follows)] = torch.tensor(follows).int()


def test_a_stage_can_write_drafts_after_the_sampler(path: str) -> None:
    plain = generate(path, DEFAULT_EXTENSIONS)
    sequences = [prompt + output for prompt, output in zip(PROMPTS, plain, strict=True)]
    lengths = ChangingDrafts(7)
    extensions = replace(
        DEFAULT_EXTENSIONS,
        draft_lengths=lambda rows: lengths,
        stages=(lambda runner: DraftsAfterTheSampler(runner, sequences),),
    )
    assert generate(path, extensions) == plain
    assert lengths.agreed == lengths.drafted > 0
