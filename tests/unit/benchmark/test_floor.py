"""The floor of a workload against values computed by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.benchmark.floor import NO_DRAFTS, Pinned, floor_of, load_shape
from minisgl.benchmark.trace import Load
from minisgl.cost.floor import Ceilings, cost_of, reduce_s, step_s, with_weights
from minisgl.models.config import load_model_spec, model_spec_from
from minisgl.models.quantization import StoredWeights

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"


def load_of(prompts: list[int], outputs: list[int]) -> Load:
    """Requests with these numbers of tokens."""
    return Load([np.zeros(tokens, np.int32) for tokens in prompts], outputs)


def test_the_decode_floor_is_the_bytes_of_its_steps(tmp_path: Path) -> None:
    """Two requests, one of 2 tokens and one of 3: a step of 2 tokens and a step of 1."""
    _, model = load_shape("qwen3-30b-a3b", tmp_path)
    cost, ceilings = cost_of(model), Ceilings(bytes_per_s=1.0, operations_per_s=1e30)
    floor = floor_of(model, load_of([2, 3], [2, 3]), ceilings)
    context = (2 + 1) + (3 + 1) + (3 + 2)
    reads = cost.read_bytes(2) + cost.read_bytes(1) + context * cost.kv_bytes
    assert floor.decode_s == pytest.approx(reads)
    assert floor.prefill_s == pytest.approx(cost.read_bytes(8192))


def test_a_window_layer_reads_its_window(tmp_path: Path) -> None:
    """Gemma 3 12B: 40 of 48 layers have a window of 1,024 tokens. One step with 3,002 keys."""
    _, model = load_shape("gemma-3-12b", tmp_path)
    cost, ceilings = cost_of(model), Ceilings(bytes_per_s=1.0, operations_per_s=1.0)
    floor = floor_of(model, load_of([3000], [2]), ceilings)
    layer = 2 * 2 * 8 * 256
    assert cost.kv_bytes == 48 * layer
    keys = 8 * 3001 + 40 * 1024
    assert floor.decode_s == pytest.approx(cost.operations + keys * layer)
    pairs = 8 * 3000 * 3001 / 2 + 40 * (1024 * 1025 / 2 + 1976 * 1024)
    head = 2 * 3840 * 262208
    products = (cost.operations - head) * 3000 + head
    assert floor.prefill_s == pytest.approx(products + 4 * 16 * 256 * pairs)


def test_several_gpus_divide_the_work_and_add_all_reduces(tmp_path: Path) -> None:
    _, model = load_shape("qwen3-14b", tmp_path)
    one, four = cost_of(model), cost_of(model, 4)
    assert four.weight_bytes == one.weight_bytes // 4
    assert four.kv_bytes == one.kv_bytes // 4
    assert cost_of(model, 16).kv_bytes == one.kv_bytes // 8, "8 KV heads: two ranks share one"
    work, ceilings = load_of([100] * 8, [50] * 8), Ceilings()
    alone, shared = (floor_of(model, work, ceilings, tp=tp) for tp in (1, 4))
    reduces_s = 49 * 81 * reduce_s(4, 8 * 2 * 5120)
    assert shared.decode_s == pytest.approx(alone.decode_s / 4 + reduces_s)


def test_fp8_products_run_at_their_own_rate(tmp_path: Path) -> None:
    _, model = load_shape("qwen3-8b", tmp_path)
    work = load_of([1000] * 8, [1] * 8)
    rates = Ceilings(bytes_per_s=1e30, operations_per_s=1e12, fp8_operations_per_s=2e12)
    plain, fp8 = (floor_of(model, work, rates, quantization=q) for q in (None, "fp8"))
    cost = with_weights(cost_of(model), model, StoredWeights("fp8", 8))
    saved = 8000 * cost.fp8_operations / 2e12
    assert plain.prefill_s - fp8.prefill_s == pytest.approx(saved)


@pytest.mark.parametrize(("name", "billions"), [("qwen3.6-27b", 26.9), ("qwen3.6-35b-a3b", 34.7)])
def test_the_weights_of_gated_delta_nets_are_counted(
    name: str, billions: float, tmp_path: Path
) -> None:
    """The sum does not count the embedding, which is as large as the output head."""
    published = json.loads((CHECKPOINTS / f"{name}.json").read_text())
    model = model_spec_from(published["config"])
    cost = cost_of(model)
    embedding = model.hidden_size * model.vocab_size
    counted = (cost.weight_bytes + cost.expert_bytes) / 2 + embedding
    assert counted / 1e9 == pytest.approx(billions, abs=0.06)
    kv = model.kv_specs[0]
    assert cost.kv_bytes == len(model.attention) * 4 * kv.kv_heads * kv.head_dim
    _, shape = load_shape(name, tmp_path)
    assert cost_of(shape) == cost


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("granite-4.0-h-micro", 3.19),
        ("granite-4.0-h-tiny", 6.94),
        ("granite-4.0-h-small", 32.2),
        ("gemma-4-e2b", 4.629 - 2.349),  # has an embedding for each layer
        ("gemma-4-e4b", 7.463 - 2.819),
        ("gemma-4-31b", 30.7 + 0.11),  # keys stand for values too, and count twice
        ("gemma-4-26b-a4b", 25.2 + 0.01),
        ("nemotron-3-nano-30b-a3b", 31.58 - 0.35),  # has an embedding beside the output head
    ],
)
def test_the_weights_of_every_kind_of_layer_are_counted(
    name: str, billions: float, tmp_path: Path
) -> None:
    """The sum counts the embedding once, which is also the output head."""
    cost = cost_of(load_shape(name, tmp_path)[1])
    assert (cost.weight_bytes + cost.expert_bytes) / 2e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "read_once_ms"), [("qwen3.6-27b", 2.27), ("qwen3.6-35b-a3b", 0.95)]
)
def test_each_decode_request_moves_its_states(
    name: str, read_once_ms: float, tmp_path: Path
) -> None:
    """64 requests read their states, write them once in a page and read the short history."""
    _, model = load_shape(name, tmp_path)
    cost, rates = cost_of(model), Ceilings()
    without = step_s(cost._replace(state_bytes=0), 64, 0, rates)
    assert 1.1 < (step_s(cost, 64, 0, rates) - without) / (read_once_ms / 1e3) < 1.2
    assert cost_of(model, tp=2).state_bytes == cost.state_bytes // 2


@pytest.mark.parametrize(
    ("name", "draft_gb", "keys_gb"),
    [("qwen3.6-27b", 3.4, 0.252), ("qwen3.6-35b-a3b", 1.15, 0.0545)],
)
def test_a_draft_reads_the_head_of_the_model_and_one_layer(
    name: str, draft_gb: float, keys_gb: float, tmp_path: Path
) -> None:
    """Each step also reads the weights of the keys that the draft head stores: without o_proj.

    With FP8 weights, the projection and the router stay bf16, and drafts read the head in FP8.
    """
    path, plain = load_shape(name, tmp_path)
    model = load_model_spec(path, drafts=True)
    cost, without = cost_of(model), cost_of(plain)
    assert without.draft_bytes == 0
    assert cost.draft_bytes / 1e9 == pytest.approx(draft_gb, rel=0.02)
    assert (cost.weight_bytes - without.weight_bytes) / 1e9 == pytest.approx(keys_gb, rel=0.01)
    assert model.draft_head is not None
    routed = getattr(model.draft_head.mlp, "num_experts", 0)
    kept = 2 * model.hidden_size * (2 * model.hidden_size + routed)
    fp8 = with_weights(cost, model, StoredWeights("fp8", 8))
    assert fp8.draft_bytes == kept + (cost.draft_bytes - kept) // 2


def test_drafts_of_a_head_take_their_time_and_give_the_pinned_tokens(tmp_path: Path) -> None:
    """One request of 27B in bfloat16: three drafts of 0.8 ms beside a step of 12 ms."""
    _, model = load_shape("qwen3.6-27b", tmp_path, drafts=True)
    work, rates = load_of([8192], [1025]), Ceilings()
    plain, drafting = (floor_of(model, work, rates, pinned=p) for p in (NO_DRAFTS, Pinned(3, 3.0)))
    assert plain.decode_s / 1024 == pytest.approx(12.3e-3, rel=0.02)
    assert drafting.decode_s / plain.decode_s == pytest.approx((12.3 + 2.4) / 12.3 / 3, rel=0.02)
