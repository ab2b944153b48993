"""A program adds per-row sampling parameters and logits processors without changing the package.

Real forwards of a tiny model run on the CPU, through the scheduler and the engine.
"""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import (
    ConfigError,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    SchedulerConfig,
)
from minisgl.core.batch import EditedReq
from minisgl.core.columns import SAMPLING_COLUMNS, Column
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, Extensions
from minisgl.engine.logits_processing import Edit, MaskedRows, ProcessingStep, TokenMask
from minisgl.llm import LLM
from minisgl.message.messages import AddReq, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.models import VOCAB_SIZE, build_model
from tests.unit.scheduler.integrity import check_scheduler

TOKENS = 12
PROMPTS = [[5, 6, 7, 8], [50, 40, 30], [9] * 20, [100, 101]]


class PushParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters that add `boost` to the logit of `push_id`, or make the output count upwards."""

    push_id: int = 0
    boost: float = 0.0
    counts_up: bool = False


PUSH_COLUMNS = (
    Column("push_id", np.int32, neutral=0, read=attrgetter("push_id")),
    Column("boost", np.float32, neutral=0, read=attrgetter("boost")),
)


class Push:
    """Adds the boost to the logits; reads both parameters from their columns on the device."""

    def __init__(self) -> None:
        self.steps = 0

    def open(self, params: SamplingParams) -> bool | None:
        assert isinstance(params, PushParams)
        if not 0 <= params.push_id < VOCAB_SIZE:
            raise InvalidRequest("push_id is not a token id", param="push_id")
        return True if params.boost else None

    def prepare(self, reqs: Sequence[tuple[EditedReq, bool]], step: ProcessingStep) -> Edit | None:
        self.steps += 1
        rows = torch.from_numpy(step.places[[req.index for req, _ in reqs]])
        ids, boost = step.views.sampling["push_id"][rows], step.views.sampling["boost"][rows]

        def edit(logits: Tensor) -> None:
            logits[rows, ids.long()] += boost

        return edit


class Counter:
    """The state of one request that counts upwards. It stands for the matcher of a grammar."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class CountUp:
    """Allows only the id after the last token's id, with a mask that is filled on the host."""

    def __init__(self, token_mask: bool) -> None:
        """token_mask: the edit is a TokenMask; otherwise it changes the logits itself."""
        self.token_mask = token_mask

    def open(self, params: SamplingParams) -> Counter | None:
        assert isinstance(params, PushParams)
        return Counter() if params.counts_up else None

    def prepare(self, reqs: Sequence[tuple[EditedReq, Counter]], step: ProcessingStep) -> Edit:
        token_rows = torch.from_numpy(step.batch.rows[[req.index for req, _ in reqs]]).long()
        positions = torch.tensor([req.position - 1 for req, _ in reqs])
        on_host = step.token_pool[token_rows, positions].to("cpu", non_blocking=True)

        rows = torch.from_numpy(step.places[[req.index for req, _ in reqs]])

        def allowed() -> list[int]:
            for (req, counter), last in zip(reqs, on_host, strict=True):
                if req.history is not None:
                    counter.seen = req.history[req.prompt_len :].tolist()
                else:
                    counter.seen.append(int(last))
            return [counter.seen[-1] + 1 if counter.seen else 3 for _, counter in reqs]

        def edit(logits: Tensor) -> None:
            mask = torch.full_like(logits, -torch.inf)
            mask[rows, allowed()] = 0.0
            logits[rows] += mask[rows]

        def compute() -> MaskedRows:
            words = torch.zeros((len(reqs), -(-VOCAB_SIZE // 32)), dtype=torch.int32)
            for index, token in enumerate(allowed()):
                words[index, token // 32] = 1 << token % 32
            return MaskedRows(rows.int(), words)

        return TokenMask(compute) if self.token_mask else edit


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", Path(tmp_path_factory.mktemp("models")))


def generate(
    path: str, params: Sequence[PushParams], num_pages: int = 64, token_mask: bool = False
) -> tuple[list[list[int]], Push, Scheduler, list[StepOutput]]:
    """Run prompt i with params[i]. Return its tokens, and the objects of the run."""
    push = Push()
    extensions = Extensions(
        sampling_columns=(*SAMPLING_COLUMNS, *PUSH_COLUMNS),
        logits_processors=(*DEFAULT_EXTENSIONS.logits_processors, push, CountUp(token_mask)),
    )
    config = EngineConfig(
        model_path=path, device="cpu", page_size=4, num_pages=num_pages, max_running_reqs=6
    )
    engine = Engine(config, SingleCommunicator(), extensions=extensions)
    engine.warm_up()
    inbox, outbox = LocalInbox(), deque[StepOutput]()
    scheduler = Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None, prefill_budget_tokens=16),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=extensions,
    )
    for uid, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True)):
        ids = np.array(prompt, dtype="<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
        check_scheduler(scheduler)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            tokens[uid].append(token)
    return tokens, push, scheduler, list(outbox)


def params(push_id: int = 0, boost: float = 0.0, counts_up: bool = False) -> PushParams:
    return PushParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        push_id=push_id,
        boost=boost,
        counts_up=counts_up,
    )


def test_a_boost_changes_the_answer_of_its_row_alone(path: str) -> None:
    plain, push, _, _ = generate(path, [params()] * 4)
    assert push.steps == 0, "a processor that no request needs does not run"
    asked = [params(), params(77, 1000.0), params(), params(31, 1000.0)]
    boosted, push, scheduler, _ = generate(path, asked)
    assert boosted == [plain[0], [77] * TOKENS, plain[2], [31] * TOKENS]
    assert push.steps >= TOKENS
    assert scheduler.totals.overlapped_steps_total > 0


@pytest.mark.parametrize("token_mask", [False, True], ids=["edit", "token mask"])
@pytest.mark.parametrize("num_pages", [64, 13], ids=["roomy", "preempted"])
def test_a_mask_from_the_host_follows_the_sampled_tokens(
    path: str, num_pages: int, token_mask: bool
) -> None:
    plain, _, _, _ = generate(path, [params()] * 4)
    asked = [params(), params(counts_up=True), params(), params(counts_up=True)]
    masked, _, scheduler, _ = generate(path, asked, num_pages, token_mask)
    counting = list(range(3, 3 + TOKENS))
    assert masked == [plain[0], counting, plain[2], counting]
    assert (scheduler.totals.preemptions_total > 0) == (num_pages < 64)
    assert scheduler.totals.overlapped_steps_total > 0


def test_a_processor_can_refuse_a_request(path: str) -> None:
    asked = [params(), params(push_id=-1), params(), params()]
    tokens, _, _, outputs = generate(path, asked)
    refused = [finished for output in outputs for finished in output.finished if finished.uid == 1]
    assert [(one.reason, one.error) for one in refused] == [
        (FinishReason.ERROR, "push_id is not a token id")
    ]
    assert [len(one) for one in tokens] == [TOKENS, 0, TOKENS, TOKENS]


def test_extensions_of_an_llm_need_a_single_rank() -> None:
    with pytest.raises(ConfigError, match="extensions need tp=1, not 2"):
        LLM(tp=2, extensions=Extensions(logits_processors=()))
