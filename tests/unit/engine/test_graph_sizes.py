"""The sizes of CUDA graphs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig, step_sizes
from minisgl.engine.memory import graph_sizes
from minisgl.models.config import load_model_spec


@pytest.mark.parametrize(
    ("model", "tp_size", "smallest"),
    [
        ("qwen3-0.6b", 1, [16, 64, 256, 768, 896]),
        ("qwen3-1.7b", 1, [16, 64, 192, 256, 320]),
        ("qwen3-8b", 8, [16, 64, 256, 384, 512, 640]),
        ("qwen3-8b", 1, step_sizes(4096)),
        ("qwen3-30b-a3b", 1, step_sizes(4096)),
    ],
)
def test_the_fewer_weights_a_rank_has_the_fewer_sizes(
    model: str, tp_size: int, smallest: list[int], tmp_path: Path
) -> None:
    """While the host bounds a step, padding costs no time. Weights also take time to be read."""
    write_model(model, tmp_path)
    config = EngineConfig(model_path=str(tmp_path), tp_size=tp_size)
    _, sizes = graph_sizes(config, load_model_spec(str(tmp_path)), 8192, drafting=False)
    assert sizes[: len(smallest)] == smallest
    assert sizes[-1] == 4096


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 10_000))
def test_padding_costs_no_more_than_with_all_sizes(
    largest: int, host_bound: int, tokens: int
) -> None:
    every, few = (
        next((size for size in sizes if size >= tokens), None)
        for sizes in (step_sizes(largest), step_sizes(largest, host_bound))
    )
    assert few == every or (few is not None and few <= host_bound)
