"""Schedules with drafts on the GPU for models with windows, sinks and soft caps.

float32 gives exactly the tokens of the CPU without drafts. In bfloat16, with FlashInfer and graphs,
tokens with drafts are as near to the best float32 logits as tokens without.
"""

import json
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.engine import Engine
from tests.gpu import test_schedules as schedules
from tests.gpu.test_draft_engine import repeated_prompts as repeated_prompts
from tests.gpu.test_draft_engine import replay
from tests.gpu.test_engine_windows import MODELS
from tests.gpu.test_schedules import BF16, CASES, FP32, ROUNDING, Case
from tests.unit.scheduler.drafts import ChangingDrafts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_WINDOW = 37  # shorter than the prompts, and not a multiple of a page


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    write_model("qwen3-0.6b", path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= MODELS[request.param] | {"sliding_window": _WINDOW}
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (path / "config.json").write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def oracle(folder: str) -> Engine:
    return schedules.exact_cpu_engine(folder)


def largest_shortfall(oracle: Engine, outputs: dict[int, list[int]]) -> float:
    prompts = schedules.prompts()
    return max(
        float(schedules.shortfall(oracle, prompts[uid % len(prompts)], output).max())
        for uid, output in outputs.items()
    )


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_bfloat16_with_drafts_is_as_exact_as_without(
    case: Case, folder: str, oracle: Engine
) -> None:
    found = []
    for lengths in (None, ChangingDrafts(7)):
        engine = schedules.gpu_engine(folder, oracle, case, BF16, lengths)
        assert engine.window is not None
        assert engine.window.tokens == _WINDOW
        outputs = schedules.run(engine, case, schedules.greedy, longest_cycles=200_000).outputs
        assert {len(output) for output in outputs.values()} == {schedules.OUTPUT_TOKENS}
        found.append(largest_shortfall(oracle, outputs))
        del engine
    assert found[1] < ROUNDING + 2 * found[0]


def test_float32_equals_the_cpu_without_drafts(folder: str, oracle: Engine) -> None:
    case, kind = CASES[3], FP32 | {"moe_backend": "torch"}
    engine = schedules.gpu_engine(folder, oracle, case, kind, ChangingDrafts(7))
    found = schedules.run(engine, case, schedules.drawn)
    plain = schedules.make_cpu(folder, oracle)
    assert found.outputs == schedules.run(plain, CASES[0], schedules.drawn).outputs


@pytest.mark.parametrize("source", ["prompt", "prediction"])
def test_graphs_accept_all_right_drafts(source: str, folder: str) -> None:
    """A window moves by eight tokens in a step."""
    replay(5, source, folder)
