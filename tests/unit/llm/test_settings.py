"""Construction and closing of the offline LLM: its settings, and settings that are refused."""

from typing import Any

import pytest

from minisgl.core import ConfigError, OutOfMemory, SamplingParams, SchedulerConfig
from minisgl.engine import Engine
from minisgl.llm import LLM
from minisgl.llm.workers import LocalWorker


def test_settings_reach_the_engine_and_the_scheduler() -> None:
    with LLM(num_pages=8, max_seq_len=64, page_size=4, overlap=False) as llm:
        assert isinstance(llm.worker, LocalWorker)
        scheduler = llm.worker.scheduler
        assert (scheduler.memory.pool.size, scheduler.memory.page_size) == (8, 4)
        assert scheduler._config == SchedulerConfig(target_step_ms=None, overlap=False)


def test_the_lowest_prefill_budget_computes_one_prompt_token_in_a_step() -> None:
    with LLM(num_pages=64, prefill_budget_tokens=1) as llm:
        answer = llm.generate([5, 6, 7], SamplingParams(max_tokens=2), progress=False)
    assert len(answer.token_ids) == 2


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("num_page", "num_pages"),
        ("tensor_parallel_size", "tp"),
        ("max_model_len", "max_seq_len"),
        ("gpu_memory_utilization", "memory_ratio"),
        ("model_path", "model"),
    ],
)
def test_unknown_setting_is_named_with_the_right_one(name: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no setting '{name}'; did you mean '{right}'"):
        LLM(**{name: 8})


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 0},
        {"max_running_reqs": 0},
        {"max_running_reqs": 8193},
        {"prefill_budget_tokens": 0},
        {"cache_type": "lru"},
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(settings: dict[str, Any]) -> None:
    """Regression: tp=0 hung; other wrong settings were ignored or became internal errors."""
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        LLM(num_pages=64, **settings)


def test_a_closed_llm_raises_config_error() -> None:
    other = LLM(num_pages=64)
    other.close()
    other.close()
    with pytest.raises(ConfigError, match="closed"):
        other.generate([5], SamplingParams(max_tokens=1), progress=False)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        LLM("./no-such-folder")


def test_an_engine_that_cannot_warm_up_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller can try again with other settings in the same process."""

    def fail(engine: Engine) -> None:
        raise OutOfMemory("no room for a step")

    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "warm_up", fail)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    with pytest.raises(OutOfMemory):
        LLM(num_pages=8, max_seq_len=16)
    assert len(closed) == 1
