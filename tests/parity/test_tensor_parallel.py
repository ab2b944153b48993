"""Two real ranks over gloo give the tokens that one gives, and the same on both."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minisgl.distributed import Communicator
from tests.parity.driver import Driver, Sampling, Work, make_engine
from tests.parity.models import VOCAB_SIZE, transformers_greedy
from tests.unit.distributed.ranks import run_ranks


def generate(comm: Communicator, paths: list[str], prompt: list[int]) -> list[list[int]]:
    outputs = []
    for path in paths:
        driver = Driver(make_engine(path, comm))
        outputs.append(driver.generate(0, prompt, 4, chunk=7))
        drawn = driver.step(Work(1, 0, prompt, sampling=Sampling(temperature=1.0, seed=3)))
        outputs[-1].append(int(drawn.tokens[0]))
    return outputs


@pytest.mark.parametrize(
    ("size", "families"),
    [(2, ["mistral", "qwen3-moe", "llama-linear-biases", "qwen2-yarn-tied"]), (4, ["qwen2"])],
    ids=["two", "four"],
)
def test_ranks_give_the_tokens_of_one(
    size: int, families: list[str], model_path: Callable[[str], str], tmp_path: Path
) -> None:
    """KV heads are replicated where there are fewer than ranks; vocabulary 151 is padded."""
    paths = [model_path(family) for family in families]
    prompt = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB_SIZE, 20)]
    first, *others = run_ranks(size, tmp_path, generate, paths, prompt)
    for other in others:
        assert other == first
    for path, tokens in zip(paths, first, strict=True):
        assert tokens[:4] == transformers_greedy(path, prompt, 4)
