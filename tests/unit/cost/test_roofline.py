"""The first step cost of a server, from its device and the timed steps of its warm-up."""

from pathlib import Path

import numpy as np
import pytest

from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.virtual_engine import DEFAULT_COST, read_cost
from minisgl.core import StepCost, StepWork
from minisgl.core.step_cost import TimedStep
from minisgl.cost.floor import cost_of
from minisgl.cost.roofline import rates_of, roofline
from minisgl.models.config import load_model_spec

H200 = "NVIDIA H200"
FAST = [TimedStep(1, 1e-6), TimedStep(512, 1e-6)]


def first(folder: Path, device: str, timed: list[TimedStep], shape: str = "qwen3-8b") -> StepCost:
    _, model = load_shape(shape, folder)
    return roofline(model, cost_of(model), 1, device, timed, 8448)


def test_on_a_known_gpu_the_estimate_is_near_a_measured_cost(tmp_path: Path) -> None:
    """The cost that a server of Qwen3-8B has measured on one H200."""
    cost, measured = first(tmp_path, H200, FAST), read_cost(DEFAULT_COST)
    for tokens, seconds in zip(measured.tokens, measured.seconds, strict=True):
        assert 0.7 < cost.predict_s(StepWork(tokens)) / seconds < 1.4
    assert cost.per_decode_key_s == pytest.approx(measured.per_decode_key_s, rel=0.4)
    assert cost.per_prefill_pair_s == pytest.approx(measured.per_prefill_pair_s, rel=0.4)


def test_slower_steps_of_the_warm_up_raise_the_estimate(tmp_path: Path) -> None:
    bare = first(tmp_path, H200, FAST)
    slow = [TimedStep(1, 2 * bare.seconds[0]), TimedStep(512, 3 * bare.predict_s(StepWork(512)))]
    cost = first(tmp_path, H200, slow)
    factors = np.array(cost.seconds) / bare.seconds
    assert factors[0] == pytest.approx(2.0)
    assert factors[list(cost.tokens).index(512) :] == pytest.approx(3.0)
    assert (np.diff(factors) >= -1e-9).all()


@pytest.mark.parametrize(
    ("shape", "chunk_ms", "beside_decoding"),
    [("qwen3-0.6b", (3.8, 6.8), False), ("qwen3-8b", (12.7, 56.0), True)],
)
def test_a_chunk_that_the_host_bounds_is_dear_beside_decoding_requests(
    shape: str, chunk_ms: tuple[float, float], beside_decoding: bool, tmp_path: Path
) -> None:
    """A host that needs 3.5 ms for the launch of a step with a chunk, and 0.3 for a CUDA graph."""
    bare = first(tmp_path, H200, FAST, shape)
    timed = [TimedStep(tokens, bare.predict_s(StepWork(tokens))) for tokens in (1, 256)]
    timed += [TimedStep(512, chunk_ms[0] / 1e3), TimedStep(2048, chunk_ms[1] / 1e3)]
    cost = first(tmp_path, H200, timed, shape)
    mixed_s = cost.predict_s(StepWork(512)) - cost.predict_s(StepWork(256))
    alone_s = cost.predict_s(StepWork(8192)) * 256 / 8192
    assert (mixed_s < alone_s) == beside_decoding


@pytest.mark.parametrize("device", ["cpu", "NVIDIA Unknown 9000"])
def test_without_known_rates_the_timed_steps_count(device: str, tmp_path: Path) -> None:
    cost = first(tmp_path, device, [TimedStep(1, 0.9), TimedStep(32, 4.0)])
    assert cost.predict_s(StepWork(1)) == pytest.approx(0.9)
    assert cost.predict_s(StepWork(32)) == pytest.approx(4.0)
    assert cost.predict_s(StepWork(63)) == pytest.approx(7.1)
    assert 0 < cost.per_prefill_pair_s < cost.per_decode_key_s < 1e-3


def test_a_chunk_that_is_no_slower_than_a_decode_step_gives_equal_times(tmp_path: Path) -> None:
    cost = first(tmp_path, "cpu", [TimedStep(1, 0.004), TimedStep(32, 0.003)])
    assert set(cost.seconds) == {0.004}


def test_recurrent_states_cost_decode_requests_and_no_prompt_tokens(tmp_path: Path) -> None:
    cost = first(tmp_path, H200, FAST, "qwen3.6-27b")
    spec = load_model_spec(str(tmp_path))
    states = sum(layer.step_bytes(16) for layer in spec.states)
    assert cost.per_decode_req_s == pytest.approx(1.3 * states / 4.25e12)
    assert cost.predict_s(StepWork(64, 0, 0, 64)) - cost.predict_s(StepWork(64)) == pytest.approx(
        64 * cost.per_decode_req_s
    )
    plain = first(tmp_path / "plain", H200, FAST)
    assert plain.per_decode_req_s == 0


@pytest.mark.parametrize("device", ["cpu", H200])
def test_steps_with_chunks_of_one_token_have_a_cost(device: str, tmp_path: Path) -> None:
    """With --max-prefill-length 1 and one row, one step is timed."""
    cost = first(tmp_path, device, [TimedStep(1, 0.9)])
    assert cost.predict_s(StepWork(1)) >= 0.9
    assert min(cost.per_prefill_pair_s, cost.per_decode_key_s) > 0


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA L40S",
        "NVIDIA GeForce RTX 4090",
    ],
)
def test_a_gpu_is_found_by_the_name_that_cuda_gives_it(name: str) -> None:
    assert rates_of(name) is not None
    assert rates_of("cpu") is None
