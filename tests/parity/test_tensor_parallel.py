"""Two real ranks over gloo give the tokens that one gives, and the same on both."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minisgl.core import StepCost
from minisgl.distributed import Communicator
from minisgl.engine import Engine
from tests.parity.driver import Driver, Sampling, Work, make_engine
from tests.parity.models import VOCAB_SIZE, transformers_greedy
from tests.unit.distributed.ranks import run_ranks


def generate_and_calibrate(
    comm: Communicator, paths: list[str], prompt: list[int]
) -> tuple[list[list[int]], StepCost]:
    outputs: list[list[int]] = []
    engine: Engine | None = None
    for path in paths:
        engine = make_engine(path, comm)
        driver = Driver(engine)
        outputs.append(driver.generate(0, prompt, 4, chunk=7))
        drawn = driver.step(Work(1, 0, prompt, sampling=Sampling(temperature=1.0, seed=3)))
        outputs[-1].append(int(drawn.tokens[0]))
    assert engine is not None
    return outputs, engine.calibrate()


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
    first, *others = run_ranks(size, tmp_path, generate_and_calibrate, paths, prompt)
    for other in others:
        assert other == first, "tokens and the step cost must be the same on every rank"
    for path, tokens in zip(paths, first[0], strict=True):
        assert tokens[:4] == transformers_greedy(path, prompt, 4)
