"""The garbage collector during a call of the LLM."""

import gc
from typing import Any

import pytest

from minisgl.core import InvalidRequest, SamplingParams
from minisgl.llm import LLM
from minisgl.llm.workers import LocalWorker


@pytest.mark.parametrize("frozen", [False, True], ids=["nothing is frozen", "the program froze"])
def test_collections_skip_the_objects_from_before_the_call(
    monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """Regression: the objects of 256 requests started full collections. With torch, one takes
    0.3 s, in which the device waited."""
    step, counts = LocalWorker.step, []

    def counting_step(worker: LocalWorker) -> Any:
        counts.append(gc.get_freeze_count())
        return step(worker)

    monkeypatch.setattr(LocalWorker, "step", counting_step)
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(num_pages=64, max_seq_len=64) as llm:
        gc.unfreeze()  # tests.conftest has frozen
        if frozen:
            gc.freeze()
        try:
            llm.generate("hello", sampling, progress=False)
            with pytest.raises(InvalidRequest):
                llm.generate("hello", sampling, regex="(", progress=False)
            assert min(counts) > 10_000
            assert (gc.get_freeze_count() > 10_000) is frozen
        finally:
            gc.freeze()
