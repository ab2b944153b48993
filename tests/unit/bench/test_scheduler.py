"""The benchmark of the scheduler when its engine refuses a request."""

import pytest

from bench.scheduler import measure_decode
from minisgl.core import ConfigError


def test_more_steps_than_the_context_give_an_error() -> None:
    """Regression: the benchmark waited forever for requests that the scheduler had refused."""
    with pytest.raises(ConfigError, match=r"cannot run the workload: .* exceed the 4096 tokens"):
        measure_decode(num_reqs=4, steps=4000, show=False)
