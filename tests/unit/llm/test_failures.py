"""An unexpected error in a step of an LLM."""

import pytest

from minisgl.core import EngineError
from minisgl.llm import LLM


def test_a_failed_step_ends_the_call_and_the_llm_can_only_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the call then waited for requests that no further iteration could end."""
    with LLM(device="cpu", num_pages=64, max_seq_len=128) as llm:
        scheduler = llm.worker.scheduler
        iterate = scheduler.iterate
        calls = iter(range(1000))

        def failing() -> None:
            if next(calls) == 1:
                monkeypatch.setattr(scheduler, "iterate", stuck)
                raise RuntimeError("a bug")
            iterate()

        def stuck() -> None:
            assert next(calls) < 100, "the call waits for requests that never end"

        monkeypatch.setattr(scheduler, "iterate", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            llm.generate("a", max_tokens=9, ignore_eos=True)
        with pytest.raises(EngineError, match="an earlier step"):
            llm.generate("a", max_tokens=2)
