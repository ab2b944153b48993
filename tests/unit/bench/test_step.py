"""The benchmark of one decode step on a machine with little memory."""

import pytest

from bench.step import main
from minisgl.core import ConfigError
from minisgl.engine import memory


def test_the_default_step_gives_one_error_on_a_small_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the allocation of 63 GiB of KV pages ended in a traceback."""
    monkeypatch.setattr(memory, "cpu_free_bytes", lambda: 8 * 2**30)
    expected = r"weights of 2\.2 GiB and KV pages of 63\.0 GiB do not fit into the 8\.0 GiB of free"
    with pytest.raises(ConfigError, match=expected):
        main(["--device", "cpu"])
