"""Models with gated delta nets on CUDA: float32 gives the tokens of transformers in every way.

The ways are eager steps, graphs of decode steps, graphs between two attention calls, drafts, and
rows that begin with a copy of a state.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core.batch import StateCopies
from minisgl.engine import Engine
from minisgl.kernel.states import begin_states, copy_states
from tests.gpu.logprobs import logprobs_of_chunks
from tests.gpu.test_schedules import ROUNDING, shortfall
from tests.parity import hybrid_models
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.models import transformers_greedy
from tests.unit.scheduler.drafts import ChangingDrafts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [(7 * i + 3) % 151 for i in range(137)]
TOKENS, HIT = 20, 128
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "gpu": lambda: hybrid_models.dense(**SIZES),
    "gpu-ends-with-delta": lambda: hybrid_models.dense(
        **SIZES, layer_types=["full_attention", "linear_attention"] * 2, linear_num_key_heads=1
    ),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder: Path = tmp_path_factory.mktemp("hybrids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_models, "MODELS", MODELS)
        paths = {name: hybrid_models.save(name, folder)[1] for name in MODELS}
    return paths.__getitem__


@cache
def expected(path: str) -> list[int]:
    torch.set_num_threads(1)  # the loops over tokens are slower with a thread for each core
    return transformers_greedy(path, PROMPT, TOKENS)


def cuda_engine(path: str, **changes: Any) -> Engine:
    settings = {"device": "cuda", "dtype": "float32", "page_size": 16, "num_pages": 128}
    return make_engine(path, **settings | changes)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, model_path: Callable[[str], str]) -> None:
    engine = cuda_engine(model_path(name))
    for row, chunk in enumerate((1, 7, 64, 0)):
        found = Driver(engine).generate(row, PROMPT, TOKENS, chunk=chunk)
        assert found == expected(model_path(name)), chunk


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_best_tokens_within_rounding(
    name: str, model_path: Callable[[str], str]
) -> None:
    """In bfloat16: float32 has no graphs, because FlashInfer does not compute it."""
    exact = cuda_engine(model_path(name))
    for size in (None, 0):
        engine = cuda_engine(model_path(name), dtype="bfloat16", cuda_graph_max_bs=size)
        engine.warm_up()
        graphs = engine._launcher.graphs
        assert (bool(graphs.decode), bool(graphs.pieces)) == (size is None, size is None)
        for row, chunk in enumerate((16, 64, 0)):
            found = Driver(engine).generate(row, PROMPT, TOKENS, chunk=chunk)
            assert shortfall(exact, PROMPT, found).max() < ROUNDING, (size, chunk)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_graphs_are_as_near_to_float32_as_eager_prompts(
    name: str, model_path: Callable[[str], str]
) -> None:
    """Log-probabilities after all tokens, in bfloat16.

    On a CPU, a last attention without its gate multiplies the distance from float32 by 2.7.
    """
    exact = logprobs_of_chunks(model_path(name), PROMPT, [137], dtype="float32")
    graphs, eager = (
        (found - exact).square().mean().sqrt()
        for size in (None, 0)
        for found in [
            logprobs_of_chunks(
                model_path(name), PROMPT, [100, 37], dtype="bfloat16", cuda_graph_max_bs=size
            )
        ]
    )
    assert graphs < 1.4 * eager


def test_mixed_steps_do_not_touch_other_rows(model_path: Callable[[str], str]) -> None:
    """Three rows decode beside the chunks of a fourth."""
    check_mixed_steps(cuda_engine(model_path("gpu")), expected(model_path("gpu")).__eq__)


def test_graphs_with_padding_do_not_touch_other_rows(model_path: Callable[[str], str]) -> None:
    exact = cuda_engine(model_path("gpu"))
    engine = cuda_engine(model_path("gpu"), dtype="bfloat16")
    engine.warm_up()
    check_mixed_steps(engine, lambda found: shortfall(exact, PROMPT, found).max() < ROUNDING)


def check_mixed_steps(engine: Engine, right: Callable[[list[int]], Any]) -> None:
    """right: whether tokens after PROMPT are right."""
    driver, tokens = Driver(engine), dict[int, list[int]]()
    for row in range(3):
        first = driver.step(Work(row, 0, PROMPT))
        tokens[row] = [int(first.tokens[0, 0])]
    starts = iter([(0, 9), (9, 40), (40, 137)])
    while len(tokens[0]) < TOKENS:
        work = [Work(row, len(PROMPT) + len(tokens[row]) - 1) for row in range(3)]
        start, end = next(starts, (0, 0))
        if end:
            work.append(Work(4, start, PROMPT[start:end], end == len(PROMPT)))
        result = driver.step(*work)
        for row in range(3):
            tokens[row].append(int(result.tokens[row, 0]))
        if end == len(PROMPT):
            tokens[4] = [int(result.tokens[3, 0])]
    while len(tokens[4]) < TOKENS:
        result = driver.step(Work(4, len(PROMPT) + len(tokens[4]) - 1))
        tokens[4].append(int(result.tokens[0, 0]))
    assert all(right(row) for row in tokens.values())


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_that_begins_with_a_copy_gives_the_tokens_of_its_source(
    drafts: bool, kv: str, model_path: Callable[[str], str]
) -> None:
    drafter = ChangingDrafts(7) if drafts else None
    engine = cuda_engine(model_path("gpu"), drafts=drafter, kv_cache_dtype=kv, num_pages=512)
    driver = Driver(engine)
    plain = driver.generate(0, PROMPT, 1) if kv == "fp8" else expected(model_path("gpu"))
    driver.step(Work(2, 0, PROMPT, samples=False))
    driver.share(2, 1, HIT)
    pages, rows = driver.snapshot(), np.array([2, 1], dtype=np.int32)
    states = StateCopies(rows[:1], pages, rows[1:], pages)
    found = driver.step(Work(1, HIT, PROMPT[HIT:]), states=states)
    assert int(found.tokens[0, 0]) == plain[0]
    if kv != "fp8":
        tokens = [plain[0]]
        while len(tokens) < TOKENS:
            result = driver.step(Work(1, len(PROMPT) + len(tokens) - 1))
            tokens.append(int(result.tokens[0, 0]))
        assert tokens == plain


def test_kernels_of_requests_and_copies_equal_their_references() -> None:
    from minisgl.kernel.triton import states as kernels

    boundaries = torch.tensor([16, 2**30, 96, 48, 0], dtype=torch.int32)
    rows, start, lengths = torch.tensor(
        [(0, 31, 8), (3, 48, 1), (1, 32, 20), (2, 0, 40)], dtype=torch.int32
    ).unbind(1)
    first = (lengths.cumsum(0) - lengths).int()
    for columns, size in ((4, 69), (9, 96)):
        out = torch.empty((6, columns), dtype=torch.int32)
        host, device = boundaries.clone(), boundaries.cuda()
        requests = rows.contiguous(), start.contiguous(), lengths.contiguous(), first
        begin_states(host, *requests, 2, 16, 69, size, out)
        found = torch.empty_like(out, device="cuda")
        kernels.begin_states(device, *(x.cuda() for x in requests), 2, 16, 69, size, found)
        assert torch.equal(found.cpu(), out)
        assert torch.equal(device.cpu(), host)
    for words in (6, 64, 8192):
        kept = torch.randint(0, 2**31 - 1, (4, 5 * words + 4), dtype=torch.int32)
        pool = torch.zeros(3, 20, words, dtype=torch.int32)
        pages = torch.tensor([[7, 2], [3, 4]], dtype=torch.int32)
        on_device = kept.cuda(), pool.cuda()
        for copied, save in ((rows[:2] // 2, True), (torch.tensor([2, 3]).int(), False)):
            copy_states(kept, copied.contiguous(), pages, pool, save)
            arguments = copied.contiguous().cuda(), pages.cuda()
            kernels.copy_states(on_device[0], *arguments, on_device[1], save)
        assert torch.equal(on_device[0].cpu(), kept)
        assert torch.equal(on_device[1].cpu(), pool)
