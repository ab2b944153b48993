"""Whole schedules on the GPU: chunks, shared prefixes, preemption and aborts change no token.

float32 with the torch backend gives exactly the tokens of the CPU. bfloat16 with FlashInfer is
compared with the float32 logits of its own text: each token is the best one within rounding.
"""

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch, DraftLengths, PendingStep
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.layers.mixer import ForwardContext
from minisgl.message.messages import AbortReq, AddReq
from minisgl.models.layer import Attended
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import Driver, Work, with_drafts
from tests.unit.scheduler.integrity import check_scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB, OUTPUT_TOKENS, ROUNDING = 1511, 24, 0.25
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
BF16: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "flashinfer"}
FP32: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch"}


@dataclass(frozen=True)
class Case:
    """crowded: the pool is so small that requests are preempted. graphs: decode steps use them."""

    name: str
    chunk: int
    cache_type: str
    overlap: bool
    crowded: bool
    graphs: bool
    page_size: int

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("plain", 8192, "naive", False, False, False, 16),
    Case("graphs", 8192, "radix", True, False, True, 16),
    Case("chunks", 13, "radix", True, False, True, 1),
    Case("crowded", 64, "radix", True, True, True, 4),
    Case("crowded-eager", 8192, "naive", True, True, False, 2),
    Case("large-pages", 40, "radix", False, False, True, 64),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def oracle(folder: str) -> Engine:
    return exact_cpu_engine(folder)


def exact_cpu_engine(folder: str) -> Engine:
    """float32 on CPU, with weights that bfloat16 holds exactly and logits that differ clearly."""
    engine = make_engine(folder, device="cpu", dtype="float32", num_pages=64)
    for parameter in engine._launcher.runner.model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8.0)
        parameter.data.copy_(parameter.data.bfloat16().float())
    return engine


def make_engine(folder: str, drafts: DraftLengths | None = None, **settings: Any) -> Engine:
    config = {"model_path": folder, "dummy_weight": True, "max_running_reqs": 6, **settings}
    return Engine(EngineConfig(**config), SingleCommunicator(), extensions=with_drafts(drafts))


def gpu_engine(
    folder: str,
    oracle: Engine,
    case: Case,
    kind: dict[str, Any],
    drafts: DraftLengths | None = None,
) -> Engine:
    tokens = 160 if case.crowded else 1024
    engine = make_engine(
        folder,
        drafts,
        device="cuda",
        page_size=case.page_size,
        num_pages=tokens // case.page_size,
        cuda_graph_max_bs=None if case.graphs else 0,
        **kind,
    )
    engine._launcher.runner.model.load_state_dict(oracle._launcher.runner.model.state_dict())
    torch.cuda.synchronize()
    return engine


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    stem = rng.integers(3, VOCAB, 80).tolist()
    lengths = [(80, 20), (33, 17), (80, 3), (0, 25), (16, 30), (33, 17), (64, 40), (0, 90)]
    return [stem[:shared] + rng.integers(3, VOCAB, own).tolist() for shared, own in lengths]


class Jitter:
    """Passes steps on to the engine, and idles the GPU for random times before and after steps."""

    def __init__(self, engine: Engine, longest_cycles: int) -> None:
        self._engine = engine
        self._longest = longest_cycles
        self._random = random.Random(3)
        self.num_pages, self.page_size = engine.num_pages, engine.page_size
        self.max_running_reqs, self.max_seq_len = engine.max_running_reqs, engine.max_seq_len
        self.window, self.snapshot_pages = engine.window, engine.snapshot_pages
        self.copier, self.images = engine.copier, engine.images

    def launch(self, batch: Batch) -> PendingStep:
        self._idle()
        pending = self._engine.launch(batch)
        self._idle()
        return pending

    def _idle(self) -> None:
        if self._longest and self._random.random() < 0.5:
            with self._engine._start.on_stream():
                torch.cuda._sleep(self._random.randrange(self._longest))


@dataclass
class Run:
    outputs: dict[int, list[int]]
    scheduler: Scheduler


def run(
    engine: Engine,
    case: Case,
    sampling: Callable[[int], SamplingParams],
    longest_cycles: int = 0,
    abort_from: int | None = None,
) -> Run:
    """Run two waves of the prompts. Requests from uid abort_from on are aborted at random times."""
    inbox, outbox = LocalInbox(), deque()
    scheduler = Scheduler(
        Jitter(engine, longest_cycles),
        SchedulerConfig(
            prefill_budget_tokens=case.chunk,
            target_step_ms=None,
            cache_type=case.cache_type,
            overlap=case.overlap,
        ),
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    chance = random.Random(5)
    count = len(prompts())
    for wave in range(2):
        uids = [wave * count + index for index in range(count)]
        for uid, prompt in zip(uids, prompts(), strict=True):
            ids = np.array(prompt, dtype="<i4").tobytes()
            inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling(uid)))
        while inbox.messages or not scheduler.idle:
            if abort_from is not None and chance.random() < 0.2:
                uid = chance.choice(uids)
                if uid >= abort_from:
                    inbox.messages.append(AbortReq(uid=uid))
            scheduler.iterate()
            check_scheduler(scheduler)
    outputs: dict[int, list[int]] = {uid: [] for uid in range(2 * count)}
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            outputs[uid].append(token)
    return Run(outputs, scheduler)


def greedy(uid: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def drawn(uid: int) -> SamplingParams:
    filters = {"top_k": 20, "top_p": 0.9} if uid % 3 == 0 else {}
    return SamplingParams(
        temperature=0.8, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=uid, **filters
    )


def shortfall(oracle: Engine, prompt: list[int], output: list[int]) -> torch.Tensor:
    """float32 [len(output)]: the difference between the best logit and that of each token."""
    caught: list[Attended] = []
    decoder = oracle._launcher.runner.model.model
    compute = decoder.forward_to_last_attention

    def spy(ids: torch.Tensor, context: ForwardContext, most_layers: int | None) -> Attended:
        caught.append(compute(ids, context, most_layers))
        return caught[-1]

    decoder.forward_to_last_attention = spy
    Driver(oracle).step(Work(0, 0, prompt + output[:-1]))
    decoder.forward_to_last_attention = compute
    with torch.inference_mode():
        logits = oracle._launcher.runner.model.logits(caught[0])[len(prompt) - 1 :]
    return logits.max(dim=-1).values - logits[torch.arange(len(output)), torch.tensor(output)]


def check_text(oracle: Engine, prompt: list[int], output: list[int]) -> float:
    """Compare each token with float32 logits; return the share of tokens that are the best one."""
    short = shortfall(oracle, prompt, output)
    assert short.max() < ROUNDING, (
        f"token {int(short.argmax())} is worse than the best by more than rounding: {short.max()}"
    )
    return float((short == 0).float().mean())


def prove(case: Case, found: Run) -> None:
    totals = found.scheduler.totals
    assert (totals.preemptions_total > 0) == case.crowded
    assert (totals.cached_tokens_total > 0) == (case.cache_type == "radix")
    assert (totals.overlapped_steps_total > 0) == case.overlap


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_by_flashinfer(case: Case, folder: str, oracle: Engine) -> None:
    engine = gpu_engine(folder, oracle, case, BF16)
    assert bool(engine._launcher.graphs.decode) == case.graphs
    found = run(engine, case, greedy)
    prove(case, found)
    count = len(prompts())
    exact = [
        check_text(oracle, prompts()[uid % count], output) for uid, output in found.outputs.items()
    ]
    assert np.mean(exact) > 0.9


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
@pytest.mark.parametrize("sampling", [greedy, drawn])
def test_float32_by_torch_equals_the_cpu(
    case: Case, sampling: Callable[[int], SamplingParams], folder: str, oracle: Engine
) -> None:
    found = run(gpu_engine(folder, oracle, case, FP32), case, sampling)
    prove(case, found)
    plain = CASES[0]
    expected = run(make_cpu(folder, oracle), plain, sampling)
    assert found.outputs == expected.outputs


def make_cpu(folder: str, oracle: Engine) -> Engine:
    engine = make_engine(folder, device="cpu", dtype="float32", num_pages=64)
    engine._launcher.runner.model.load_state_dict(oracle._launcher.runner.model.state_dict())
    return engine


@pytest.mark.parametrize("sampling", [greedy, drawn])
def test_jitter_changes_no_token(
    sampling: Callable[[int], SamplingParams], folder: str, oracle: Engine
) -> None:
    """The order of the stream, and not the timing, keeps the steps from reusing pages too early."""
    case = CASES[3]
    steady = run(gpu_engine(folder, oracle, case, BF16), case, sampling)
    shaken = run(gpu_engine(folder, oracle, case, BF16), case, sampling, longest_cycles=4_000_000)
    assert shaken.outputs == steady.outputs
    prove(case, shaken)


def test_aborts_leave_the_others_alone(folder: str, oracle: Engine) -> None:
    case = CASES[3]
    count = len(prompts())
    engine = gpu_engine(folder, oracle, case, BF16)
    found = run(engine, case, greedy, longest_cycles=1_000_000, abort_from=count)
    for uid in range(count):
        assert len(found.outputs[uid]) == OUTPUT_TOKENS
        check_text(oracle, prompts()[uid], found.outputs[uid])
    ended = [uid for uid in range(count, 2 * count) if len(found.outputs[uid]) < OUTPUT_TOKENS]
    assert ended, "at least one request must have been aborted before its last token"
    for uid in ended:
        if found.outputs[uid]:
            check_text(oracle, prompts()[uid - count], found.outputs[uid])
    pool, cache = found.scheduler.memory.pool, found.scheduler.memory.tree
    assert pool.num_free + pool.num_quarantined + cache.evictable_pages == pool.size
