"""The sizes of CUDA graphs."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.models import write_model
from minisgl.core import EngineConfig, step_sizes
from minisgl.engine.memory import graph_sizes
from minisgl.models.config import load_model_config


def sizes_of(name: str, folder: Path, tp_size: int = 1) -> list[int]:
    write_model(name, folder)
    config = EngineConfig(model_path=str(folder), tp_size=tp_size)
    return graph_sizes(config, load_model_config(str(folder)), 8192, drafting=False)[1]


def test_a_small_model_has_few_sizes_while_the_host_bounds_a_step(tmp_path: Path) -> None:
    assert sizes_of("qwen3-0.6b", tmp_path / "0.6b")[:5] == [16, 64, 256, 768, 896]
    assert sizes_of("qwen3-8b", tmp_path / "8b") == [16, *step_sizes(4096)[2:]]


def test_a_rank_with_fewer_weights_is_host_bound_with_more_tokens(tmp_path: Path) -> None:
    assert sizes_of("qwen3-8b", tmp_path / "8b", tp_size=8)[:5] == [16, 64, 256, 512, 640]


def test_the_experts_that_a_token_chooses_count_as_weights(tmp_path: Path) -> None:
    assert sizes_of("qwen3-30b-a3b", tmp_path / "moe")[:4] == [16, 64, 256, 320]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_larger_steps_are_padded_as_before_and_no_step_becomes_too_large(
    largest: int, host_bound: int
) -> None:
    every, sizes = step_sizes(largest), step_sizes(largest, host_bound)
    assert sizes[-1:] == every[-1:]
    assert [size for size in sizes if size >= host_bound] == [n for n in every if n >= host_bound]
    assert all(after <= 4 * before for before, after in pairwise(sizes) if after < host_bound)
