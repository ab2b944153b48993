"""Two and four GPUs: sums over peer memory are correct, and all schedules give one GPU's tokens."""

import gc
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig, SamplingParams, WorkerDied
from minisgl.core.batch import LogprobsRequest
from minisgl.distributed.comm import Communicator, GroupCommunicator
from minisgl.engine import Engine
from minisgl.engine.warmup import StepShape, warmup_batch
from minisgl.llm import LLM, Completion
from minisgl.llm.workers import RankWorkers
from tests.parity.models import build_model, transformers_greedy, transformers_logits
from tests.parity.rank_cases import OUTPUT_TOKENS, Outcome, RankCase, prompts, prove, run_on
from tests.unit.distributed.ranks import run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu
SIZES = pytest.mark.parametrize(
    "size",
    [
        pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs"), id=f"tp{n}")
        for n in (2, 4)
    ],
)
FP32 = {"device": "cuda", "dtype": "float32", "attention_backend": "torch"}
BF16 = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flashinfer"}
MANY, ROUNDING = 8192, 0.5
CASES = [
    RankCase("qwen3-wide", 7, "radix", overlap=True, crowded=True, aborts=True),
    RankCase("qwen3-moe-wide", 64, "naive", overlap=False, crowded=True, aborts=False),
    RankCase("qwen3-wide", MANY, "naive", overlap=True, crowded=False, aborts=False, page_size=16),
    RankCase("qwen3-moe-wide", 13, "radix", overlap=True, crowded=False, aborts=True),
    RankCase("qwen3-wide", 64, "radix", overlap=True, crowded=False, aborts=False, drawn=True),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {case.family: build_model(case.family, folder) for case in CASES}


def sums(comm: Communicator) -> tuple[float, bool, list[bytes]]:
    """Return the worst error against float64, whether all replays agree, and all results' bits."""
    assert isinstance(comm, GroupCommunicator)
    peers = comm.peers
    assert peers is not None, "the GPUs of one host must be able to read each other's memory"
    peers.memory[: peers.layout.flags_offset].fill_(255)  # NaN in every dtype
    sizes = [(1, 5120), (3, 64), (8, 5120), (64, 5120), (77, 5120), (256, 5120), (1000, 1024)]
    found = [
        one_sum(comm, rows, width, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for rows, width in [*sizes, (513, 5120)]
    ]
    errors, agreed, bits = zip(*found, strict=True)
    return max(errors), all(agreed), list(bits)


def one_sum(
    comm: Communicator, rows: int, width: int, dtype: torch.dtype
) -> tuple[float, bool, bytes]:
    torch.cuda.synchronize()
    comm.agree_min(0)  # the width changes here, so no sum may be in flight on any rank
    maker = torch.Generator().manual_seed(rows * width)
    parts = torch.randn((comm.tp.size, rows, width), generator=maker).to(dtype)
    before = torch.randn((rows, width), generator=maker).to(dtype)
    weight = torch.rand(width, generator=maker).to(dtype)
    total = parts.double().sum(0) + before.double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    part, start, weight = parts[comm.tp.rank].cuda(), before.cuda(), weight.cuda()
    x, residual, found = (torch.empty_like(part) for _ in range(3))

    def step() -> None:
        x.copy_(part)
        residual.copy_(start)
        found.copy_(comm.reduce_norm(x, residual, weight, 1e-6)[0])

    agreed = True
    chance = random.Random(comm.tp.rank)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(3):
            step()
        graph.capture_end()
        first = found.clone()
        for _ in range(20):
            found.fill_(torch.nan)
            torch.cuda._sleep(chance.randrange(200_000))
            graph.replay()
            agreed &= bool((found == first).all())
        x.copy_(part)
        residual.copy_(start)
        some = torch.tensor([rows - 1, 0, rows // 2])  # after two shots, one rank has each row
        taken = comm.take_rows(comm.reduce_norm(x, residual, weight, 1e-6)[1], some.cuda())
        result = torch.cat((first, taken)).cpu()
    error = max(
        (found.double() - wanted).abs().max() / wanted.abs().max()
        for found, wanted in zip(
            result.split([rows, len(some)]), (expected, total[some]), strict=True
        )
    )
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
    return float(error) / tolerance, agreed, result.view(torch.uint8).numpy().tobytes()


@SIZES
def test_sums_over_peer_memory(size: int, tmp_path: Path) -> None:
    """One-shot and two-shot sums in two dtypes, replayed while random delays hold ranks back."""
    first, *others = run_ranks(size, tmp_path, sums, device="cuda")
    for worst, agreed, bits in (first, *others):
        assert worst < 1, "the error exceeds the tolerance of the dtype"
        assert agreed
        assert bits == first[2], "every rank must have the same bits"


def run(
    size: int, engine: dict[str, str], cases: list[RankCase], paths: dict[str, str], folder: Path
) -> list[Outcome]:
    """Run the cases, check that they were effective and that all ranks agree; rank 0's outcomes."""
    given = [replace(case, engine=engine) for case in cases]
    first, *others = run_on(size, given, paths, folder, "cuda" if size > 1 else "cpu")
    for index, case in enumerate(given):
        prove(case, first[index])
        for other in others:
            assert other[index] == first[index], f"the ranks differ in {case}"
    return first


@SIZES
def test_float32_gives_the_tokens_of_one(size: int, paths: dict[str, str], tmp_path: Path) -> None:
    outcomes = run(size, FP32, CASES, paths, tmp_path)
    (alone := tmp_path / "alone").mkdir()
    drawn = run(1, FP32, [case for case in CASES if case.drawn], paths, alone)
    for case, outcome in zip(CASES, outcomes, strict=True):
        path = paths[case.family]
        greedy = [transformers_greedy(path, prompt, OUTPUT_TOKENS) for prompt in prompts()]
        expected = drawn[0].tokens if case.drawn else greedy * case.waves
        for tokens, wanted in zip(outcome.tokens, expected, strict=True):
            assert tokens == wanted[: len(tokens)], str(case)


@SIZES
def test_bfloat16_stays_within_rounding(size: int, paths: dict[str, str], tmp_path: Path) -> None:
    """Each token is the best of the float32 logits of its own text, or as good within rounding."""
    cases = [case for case in CASES if not case.drawn]
    for case, outcome in zip(cases, run(size, BF16, cases, paths, tmp_path), strict=True):
        exact, count = 0, 0
        for prompt, tokens in zip(prompts() * case.waves, outcome.tokens, strict=True):
            if tokens:
                logits = transformers_logits(paths[case.family], prompt + tokens[:-1])
                chosen = logits[len(prompt) - 1 :]
                short = chosen.max(-1).values - chosen[range(len(tokens)), tokens]
                assert short.max() < ROUNDING, str(case)
                exact, count = exact + int((short == 0).sum()), count + len(tokens)
        assert exact > 0.85 * count, str(case)


def prompt_logprobs(comm: Communicator, path: str, tokens: int, device: str) -> list[list[float]]:
    """Log-probabilities of a prompt's tokens, from a step padded to a graph's size and eagerly."""
    found = []
    for largest_graph in (4, 0):
        config = EngineConfig(
            model_path=path,
            device=device,
            tp_size=comm.tp.size,
            num_pages=tokens // 16 + 1,
            max_running_reqs=4,
            cuda_graph_max_bs=largest_graph,
            dummy_weight=True,
        )
        engine = Engine(config, comm, max_chunk_tokens=2048)
        batch = warmup_batch(engine, StepShape(0, tokens, 0))
        assert batch is not None
        ids = np.random.default_rng(0).integers(5, 1000, tokens + 1, dtype=np.int32)
        updates = batch.page_updates
        pages = updates._replace(ids=np.arange(len(updates.ids), dtype=np.int32))
        wanted = LogprobsRequest(0, -1, 0, targets=ids[1:])
        step = engine.launch(
            replace(batch, chunk_ids=ids[:-1], page_updates=pages, logprobs=(wanted,))
        )
        reported = step.wait().prompt_logprobs
        assert reported is not None
        found.append(reported[0].chosen.tolist())
        engine.close()
    return found


@SIZES
def test_log_probabilities_of_a_padded_prompt(size: int, tmp_path: Path) -> None:
    """The padded rows of the graph are summed in two shots, the prompt's own rows in one shot."""
    tokens = {2: 1850, 4: 100}[size]  # a row of the sum is 2 KiB
    path = write_model("qwen3-0.6b", tmp_path)
    first, *others = run_ranks(size, tmp_path, prompt_logprobs, path, tokens, "cuda", device="cuda")
    assert np.isfinite(first).all()
    # The log-probabilities of different tokens have a spread of 0.6.
    assert np.abs(np.subtract(*first)).max() < 0.15
    assert others == [first] * (size - 1), "every rank must have the same"


def without_room(comm: Communicator) -> tuple[bool, float]:
    """Fill the last rank's GPU, set up peer memory, and sum.

    Returns whether the rank uses peer memory, and the mean of the sum.
    """
    assert isinstance(comm, GroupCommunicator)
    comm.peers = filled = None
    gc.collect()
    if comm.tp.rank == comm.tp.size - 1:
        free, _ = torch.cuda.mem_get_info(comm.device)
        filled = torch.empty(free - 2**27, dtype=torch.uint8, device=comm.device)
    comm.share_memory()
    del filled
    ones = torch.ones(4, 8, device=comm.device)
    return comm.peers is not None, comm.reduce_norm(ones, None, ones[0], 0.0)[1].mean().item()


@SIZES
def test_ranks_do_not_wait_for_one_without_peer_memory(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, tmp_path, without_room, device="cuda") == [(False, size)] * size


@SIZES
def test_a_dead_rank_ends_the_llm(size: int, tmp_path: Path) -> None:
    """The other ranks wait in a sum that never ends, and the caller still gets WorkerDied."""

    def greedy(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)

    path = write_model("qwen3-0.6b", tmp_path, full_vocabulary=True)  # every token has a text
    with LLM(path, dummy_weight=True, tp=size, num_pages=256, max_running_reqs=8) as llm:
        done = llm.generate([5, 6, 7], greedy(8), progress=False)
        assert isinstance(done, Completion)
        assert len(done.token_ids) == 8
        assert isinstance(llm.worker, RankWorkers)
        stream = llm.stream([5, 6, 7], greedy(3000))
        next(stream)
        llm.worker.children[-1].process.kill()
        with pytest.raises(WorkerDied, match=rf"scheduler-{size - 1} \(pid \d+\) was killed"):
            list(stream)
