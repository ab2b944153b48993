"""The name of a benchmark on the command line."""

import pytest

from bench.__main__ import NAMES
from minisgl.benchmark.cli import _MOVED, main
from minisgl.core import ConfigError


@pytest.mark.parametrize(
    ("name", "near"),
    [("onlin", "online"), ("flet", "fleet")],
)
def test_a_misspelt_benchmark_gives_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no benchmark '{name}'; .* mean '{near}'"):
        main([name])


def test_an_unknown_benchmark_gives_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match=r"benchmark 'latency'; known: fleet, .*, online$"):
        main(["latency"])


@pytest.mark.parametrize("name", _MOVED)
def test_a_moved_benchmark_names_its_command(name: str) -> None:
    assert name in NAMES
    with pytest.raises(ConfigError, match=f"moved: run `python -m bench {name}` in a checkout"):
        main([name])
