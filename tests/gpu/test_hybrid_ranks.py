"""Gated delta nets on 2 and 4 GPUs: float32 gives the tokens of transformers, also after hits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.core.batch import StateCopies
from minisgl.distributed.comm import Communicator
from tests.gpu.test_hybrid_engine import HIT, MODELS, PROMPT, TOKENS, expected
from tests.parity import hybrid_models
from tests.parity.driver import Driver, Work, make_engine
from tests.unit.distributed.ranks import run_ranks

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


def tokens_of_rank(comm: Communicator, path: str) -> tuple[list[int], list[int]]:
    """Return the tokens after a prompt in chunks, and after a hit with a copied state."""
    settings = {"device": "cuda", "dtype": "float32", "page_size": 16, "num_pages": 128}
    driver = Driver(make_engine(path, comm, **settings))
    chunked = driver.generate(0, PROMPT, TOKENS, chunk=64)
    driver.step(Work(2, 0, PROMPT, samples=False))
    driver.share(2, 1, HIT)
    pages, rows = driver.snapshot(), np.array([2, 1], dtype=np.int32)
    states = StateCopies(rows[:1], pages, rows[1:], pages)
    found = driver.step(Work(1, HIT, PROMPT[HIT:]), states=states)
    hit = [int(found.tokens[0, 0])]
    while len(hit) < TOKENS:
        hit.append(int(driver.step(Work(1, len(PROMPT) + len(hit) - 1)).tokens[0, 0]))
    return chunked, hit


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs"), id=f"tp{n}")
        for n in (2, 4)
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_tokens_of_transformers(size: int, name: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_models, "MODELS", MODELS)
        path = hybrid_models.save(name, tmp_path)[1]
    right = expected(path)
    found = run_ranks(size, tmp_path, tokens_of_rank, path, device="cuda")
    assert found == [(right, right)] * size
