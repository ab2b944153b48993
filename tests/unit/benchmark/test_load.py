"""Flags of loads that describe none are one sentence, not a traceback."""

from collections.abc import Callable, Sequence

import pytest

from minisgl.benchmark.floor import main as floor
from minisgl.benchmark.simulate import main as simulate
from minisgl.core import ConfigError


@pytest.mark.parametrize("main", [floor, simulate], ids=["offline", "online"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--requests 0", "--requests must be positive"),
        ("--prompt-tokens 0 5", "--prompt-tokens takes"),
        ("--prompt-tokens 9 5", "--prompt-tokens takes"),
        ("--output-tokens 9 5", "--output-tokens takes"),
        ("--shared-prefix -1", "--shared-prefix and --largest-id must not"),
    ],
)
def test_flags_without_a_load(
    main: Callable[[Sequence[str]], int], flags: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(flags.split())


def test_no_requests_of_a_trace() -> None:
    with pytest.raises(ConfigError, match="--requests must be positive"):
        simulate(["--trace", "never-opened", "--requests", "0"])
