"""Copies of states to KV pages: a row that begins with a copy gives the tokens of its source."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from minisgl.core.batch import StateCopies
from minisgl.distributed.comm import Communicator
from minisgl.engine import state_copies
from minisgl.engine.states import RowStates
from minisgl.kernel.dispatch import copy_states
from tests.parity import hybrid
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.hybrid_models import MODELS, save
from tests.parity.models import transformers_greedy
from tests.unit.distributed.ranks import run_ranks
from tests.unit.scheduler.drafts import ChangingDrafts

# Only two tokens follow the hit, so that the inputs of the convolution before it count.
TOKENS, HIT, PROMPT = 8, 48, hybrid.PROMPT[:50]
NOTHING = np.zeros(0, dtype=np.int32)


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder: Path = tmp_path_factory.mktemp("hybrids")
    return cache(lambda name: save(name, folder)[1])


def expected(path: str, guess: list[int]) -> list[int]:
    return transformers_greedy(path, PROMPT, TOKENS, guess=guess)


def copies(save: Driver | None, load: bool, pages: np.ndarray) -> StateCopies:
    """Save the states of row 0 to `pages`, load row 1 from them, or both."""
    none, row = np.zeros((0, pages.shape[1]), dtype=np.int32), np.array([0, 1], dtype=np.int32)
    saved = (row[:1], pages) if save else (NOTHING, none)
    loaded = (row[1:], pages) if load else (NOTHING, none)
    return StateCopies(*saved, *loaded)


def run(driver: Driver, saved_at: int = 50) -> list[int]:
    """The tokens of row 1, which begins with a copy of row 0 at token 48.

    saved_at: tokens of row 0 when its state is saved.
    """
    pages = driver.snapshot()
    driver.step(Work(0, 0, PROMPT[:saved_at], samples=False))
    if saved_at < len(PROMPT):
        driver.step(Work(2, 0, [5]), states=copies(driver, False, pages))
        driver.step(Work(0, saved_at, PROMPT[saved_at:]))
    driver.share(0, 1, HIT)
    copied = copies(driver if saved_at == len(PROMPT) else None, True, pages)
    first = driver.step(Work(1, HIT, PROMPT[HIT:]), states=copied)
    tokens = [int(first.tokens[0, 0])]
    for _ in range(TOKENS - 1):
        work = Work(1, len(PROMPT) + len(tokens) - 1)
        tokens.append(int(driver.step(work).tokens[0, 0]))
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_begins_with_a_copy_gives_the_tokens_of_transformers(
    name: str, hybrid_path: Callable[[str], str]
) -> None:
    path = hybrid_path(name)
    tokens = run(Driver(make_engine(path, page_size=16)))
    assert tokens == expected(path, tokens)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("saved_at", [49, 50])
def test_a_state_is_a_valid_copy_at_any_time_after_its_boundary(
    saved_at: int, drafts: bool, hybrid_path: Callable[[str], str]
) -> None:
    path, drafter = hybrid_path("qwen3_5"), ChangingDrafts(7) if drafts else None
    tokens = run(Driver(make_engine(path, drafts=drafter, page_size=16)), saved_at)
    assert tokens == expected(path, tokens)


def test_pages_of_an_fp8_pool_hold_exact_copies(hybrid_path: Callable[[str], str]) -> None:
    engine = make_engine(hybrid_path("qwen3_5"), page_size=16, kv_cache_dtype="fp8")
    plain = make_engine(hybrid_path("qwen3_5"), page_size=16)
    assert engine.snapshot_pages == pytest.approx(4 * plain.snapshot_pages, abs=3)
    driver = Driver(engine)
    assert run(driver) == Driver(engine).generate(3, PROMPT, TOKENS, chunk=HIT)


def run_rank(comm: Communicator, path: str) -> list[int]:
    return run(Driver(make_engine(path, comm, page_size=16)))


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.proof)])
def test_each_rank_copies_its_heads(
    size: int, hybrid_path: Callable[[str], str], tmp_path: Path
) -> None:
    """With fewer key heads or KV heads than ranks, neighbouring ranks have the same ones."""
    path = hybrid_path("qwen3_5-ends-with-delta")
    found = run_ranks(size, tmp_path, run_rank, path)
    assert found == [expected(path, found[0])] * size


def _zero(part: str, states: RowStates, rows: Tensor) -> None:
    for memory in states.layers:
        getattr(memory, part)[rows.long()] = 0


def _keep(states: RowStates, rows: Tensor) -> None:
    """Change nothing."""


MUTATIONS = {
    "no-state": (partial(_zero, "state"), 50),
    "no-inputs-of-the-convolution": (partial(_zero, "tails"), 50),
    "a-page-too-early": (_keep, 48),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mutation", "saved_at"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_copy_changes_the_tokens_of_every_model(
    name: str,
    mutation: Callable[[RowStates, Tensor], None],
    saved_at: int,
    hybrid_path: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the tests above would prove nothing."""
    engine = make_engine(hybrid_path(name), page_size=16)
    states = engine._launcher.runner.states
    assert states is not None

    def wrong(kept: Tensor, rows: Tensor, pages: Tensor, pool: Tensor, saves: bool) -> None:
        copy_states(kept, rows, pages, pool, saves)
        if not saves:
            mutation(states, rows)

    monkeypatch.setattr(state_copies, "copy_states", wrong)
    tokens = run(Driver(engine), saved_at)
    assert tokens != expected(hybrid_path(name), tokens)
