"""Failures and interrupts of an LLM."""

from typing import Any

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


def test_the_next_call_aborts_the_requests_of_an_interrupted_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the requests ran to their end, and the next call waited for them."""

    def interrupted(uids: Any) -> None:
        raise KeyboardInterrupt

    with LLM(device="cpu", num_pages=64, max_seq_len=512) as llm:
        stream = llm.stream([5, 6], temperature=0.0, max_tokens=300, ignore_eos=True)
        next(stream)
        with monkeypatch.context() as patched:
            patched.setattr(llm.worker, "abort_and_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.close()  # type: ignore[attr-defined]
        before = llm.worker.scheduler.totals.output_tokens_total
        llm.generate([7], max_tokens=2, progress=False)
        assert llm.worker.scheduler.totals.output_tokens_total - before < 50
