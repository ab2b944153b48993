"""A draft head on CUDA: its drafts are those of the CPU, in eager steps and in graphs.

tests/parity compares those of the CPU with transformers.
"""

import pytest
import torch
from transformers.modeling_layers import MtpModel

from minisgl.engine import Engine
from tests.gpu.test_hybrid_engine import MODELS, PROMPT, cuda_engine
from tests.parity import hybrid_models
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.hybrid_models import Heads
from tests.unit.scheduler.drafts import ChangingDrafts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_models, "MODELS", MODELS)
        saved = hybrid_models.save("gpu", tmp_path_factory.mktemp("heads"))
    return Heads(*saved, agrees=True)


def drafts_of(engine: Engine, steps: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the drafts of two rows after each decode step."""
    driver, found = Driver(engine), []
    tokens = {row: [*PROMPT[row:]] for row in (1, 3)}
    for row, ids in tokens.items():
        for start in range(0, len(ids), 64):
            last = start + 64 >= len(ids)
            result = driver.step(Work(row, start, ids[start : start + 64], last))
        ids.append(int(result.tokens[0, 0]))
    pool = engine._launcher.runner.token_pool
    for _ in range(steps):
        work = [Work(row, len(ids) - 1) for row, ids in tokens.items()]
        result = driver.step(*work, drafts=3)
        for place, (row, ids) in enumerate(tokens.items()):
            ids.append(int(result.tokens[place, 0]))
            found.append(([*ids], pool[row, len(ids) : len(ids) + 3].tolist()))
    return found


def test_float32_drafts_are_those_of_the_cpu(heads: Heads) -> None:
    settings = {"drafts": ChangingDrafts(3, head=True), "speculative": "mtp"}
    on_cpu = make_engine(heads.path, page_size=16, num_pages=128, **settings)
    assert drafts_of(cuda_engine(heads.path, **settings), 6) == drafts_of(on_cpu, 6)


@pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="this version of transformers has another head"
)
def test_graphs_make_the_drafts_of_transformers_within_rounding(heads: Heads) -> None:
    """In bfloat16 a draft between two ids of almost equal score can differ."""
    settings = {"drafts": ChangingDrafts(3, head=True), "speculative": "mtp", "dtype": "bfloat16"}
    engine = cuda_engine(heads.path, **settings)
    engine.warm_up()
    assert engine._launcher.graphs.decode
    right = [
        draft == wanted
        for tokens, drafts in drafts_of(engine, 16)
        for draft, wanted in zip(drafts, heads.drafts(tokens, 3), strict=True)
    ]
    assert sum(right) > 0.8 * len(right)
