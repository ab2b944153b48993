"""Engines of models with windows, sinks and soft caps: steps in graphs against eager torch.

The heads of full layers of Gemma 4 have 512 elements, which FlashInfer does not support.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.benchmark.models import SHAPES, write_model
from minisgl.core.batch import StepResult
from minisgl.engine import Engine
from tests.parity.driver import Driver, Work, logprobs_of, make_engine

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window_pattern": None,
    "vocab_size": 1511,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
# Each token of gpt-oss selects all experts, so that rounding cannot change the selection.
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": SHAPES["gpt-oss-20b"]
    | _SMALL
    | {"num_local_experts": 4, "num_experts_per_tok": 4, "num_attention_heads": 16}
    | {"quantization_config": None},
    "gemma-3": SHAPES["gemma-3-12b"] | _SMALL | {"sliding_window": 300},
    "gemma-2": _SMALL
    | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "sliding_window": 50}
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    | {"query_pre_attn_scalar": 200, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-4": SHAPES["gemma-4-26b-a4b"]
    | _SMALL
    | {"num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 128, "sliding_window": 300},
    "gemma-4-e2b": SHAPES["gemma-4-e2b"]
    | _SMALL
    | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    | {"num_kv_shared_layers": 4, "vocab_size_per_layer_input": 1511, "sliding_window": 300},
    "olmo-3": _SMALL
    | {"architectures": ["Olmo3ForCausalLM"], "head_dim": 128, "sliding_window": 40},
}
KV = pytest.mark.parametrize("kv", ["auto", "fp8"])


def engine_of(model: str, folder: Path, attention: str, kv: str) -> Engine:
    """An engine with random weights, the same for each attention backend."""
    write_model("qwen3-0.6b", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | MODELS[model]
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (folder / "config.json").write_text(text, encoding="utf-8")
    engine = make_engine(
        str(folder),
        dummy_weight=True,
        device=DEVICE,
        dtype="bfloat16",
        page_size=16,
        num_pages=512,
        attention_backend=attention,
        kv_cache_dtype=kv,
    )
    for parameter in engine._launcher.runner.model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return engine


def results_of(engine: Engine) -> list[StepResult]:
    """The results of a decode step and of a mixed step.

    The earlier steps sample no token, so the input of each decode is id 0 in every engine.
    """
    rng, driver = np.random.default_rng(3), Driver(engine)
    driver.clear_tokens()
    ids = {row: rng.integers(3, 1511, 1300).tolist() for row in range(6)}
    lengths = {0: 1200, 1: 20, 3: 129, 4: 700, 5: 3}
    for row, length in lengths.items():
        driver.step(Work(row, 0, ids[row][: length // 2], samples=False))
    driver.step(
        *(Work(row, n // 2, ids[row][n // 2 : n], samples=False) for row, n in lengths.items())
    )
    decode = [Work(row, lengths[row]) for row in (0, 1, 3)]
    mixed = [*(Work(row, lengths[row]) for row in (4, 5)), Work(2, 0, ids[2][:500])]
    return [
        driver.step(*work, logprobs=logprobs_of(*work, prompts=False)) for work in (decode, mixed)
    ]


def differences(ours: StepResult, theirs: StepResult) -> list[float]:
    """The differences of the log-probabilities of all tokens that an engine reports.

    If only one engine reports a token, the log-probability of the other engine is at most that of
    the last token in its report. The function then returns the least possible difference.
    """
    found = []
    for row in range(len(ours.tokens)):
        our_top, their_top = (_top(result, row) for result in (ours, theirs))
        our_last, their_last = min(our_top.values()), min(their_top.values())
        for token in our_top.keys() | their_top.keys():
            if token not in their_top:
                found.append(max(our_top[token] - their_last, 0.0))
            elif token not in our_top:
                found.append(max(their_top[token] - our_last, 0.0))
            else:
                found.append(abs(our_top[token] - their_top[token]))
    return found


def _top(result: StepResult, row: int) -> dict[int, float]:
    """The log-probabilities of the most likely tokens of a row, by token."""
    assert result.logprobs is not None
    ids, values = result.logprobs.top_ids[row].tolist(), result.logprobs.top[row].tolist()
    return dict(zip(ids, values, strict=True))


@KV
@pytest.mark.parametrize("model", MODELS)
def test_graphs_and_eager_torch_give_the_same_log_probabilities(
    model: str, kv: str, tmp_path: Path
) -> None:
    """Rounding alone makes the log-probabilities of the two engines differ.

    The root mean square of the differences is stable. With the model of gpt-oss it was 0.028 to
    0.032 for keys in bfloat16 (four inputs) and 0.07 to 0.09 for keys in FP8. With keys in
    bfloat16, a window that is one token too long or too short makes it at least 0.18, and sink
    logits that are 0.5 too low make it at least 0.07. The largest difference depends on the input:
    0.06 to 0.11 and 0.21 to 0.32 (six inputs; 0.107 and 0.215 with the one of this test).
    """
    mean_limit, limit = (0.05, 0.1) if kv == "auto" else (0.12, 0.25)
    if (model, kv) == ("gpt-oss", "auto"):
        limit = 0.15  # 0.107 with these inputs; each engine differs from float32 by up to 0.13
    found = []
    for attention in ("auto", "torch"):
        engine = engine_of(model, tmp_path, attention, kv)
        assert engine.window is not None
        engine.warm_up()
        graphs = engine._launcher.graphs
        assert bool(graphs.decode) == bool(graphs.pieces) == (attention == "auto")
        found.append(results_of(engine))
        engine.close()
    ours, theirs = found
    assert all(result.finite.all() for result in (*ours, *theirs))
    pairs = zip(ours, theirs, strict=True)
    all_differences = [difference for pair in pairs for difference in differences(*pair)]
    assert np.sqrt(np.mean(np.square(all_differences))) < mean_limit
    assert max(all_differences) < limit
