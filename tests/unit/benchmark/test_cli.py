"""The name of a benchmark on the command line."""

import pytest

from minisgl.benchmark.cli import main
from minisgl.core import ConfigError


@pytest.mark.parametrize(
    ("name", "near"),
    [("onlin", "online"), ("serve", "server"), ("draft", "drafts")],
)
def test_a_misspelt_benchmark_gives_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no benchmark '{name}'; .* mean '{near}'"):
        main([name])


def test_an_unknown_benchmark_gives_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match=r"benchmark 'latency'; known: attack, .*, structured$"):
        main(["latency"])
