"""The garbage collector of a program that calls the LLM."""

import gc
import weakref

from minisgl.core import SamplingParams
from minisgl.llm import LLM


class Cycle:
    """An object that only a garbage collection deletes."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_from_between_the_calls_are_collected() -> None:
    """Regression: a call froze the heap. A program that called in a loop got no collection."""
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    thresholds = gc.get_threshold()
    with LLM(num_pages=64, max_seq_len=64) as llm:
        gc.collect()
        gc.unfreeze()  # tests.conftest has frozen
        gc.set_threshold(200, *thresholds[1:])
        try:
            alive = []
            for _ in range(40):
                alive.append(weakref.ref(Cycle()))
                llm.generate("hello", sampling, progress=False)
            assert sum(cycle() is not None for cycle in alive) < len(alive)
        finally:
            gc.set_threshold(*thresholds)
            gc.freeze()
