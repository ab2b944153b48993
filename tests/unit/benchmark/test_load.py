"""Wrong flags of a load give one sentence, not a traceback."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.scheduler import main as scheduler
from bench.server import main as server
from bench.simulate import main as simulate
from bench.step import main as step
from minisgl.benchmark.floor import main as floor
from minisgl.benchmark.online import main as online
from minisgl.core import ConfigError


@pytest.mark.parametrize("main", [floor, simulate], ids=["offline", "online"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--prompt-tokens 0 5", "--prompt-tokens takes"),
        ("--prompt-tokens 9 5", "--prompt-tokens takes"),
        ("--output-tokens 9 5", "--output-tokens takes"),
    ],
)
def test_empty_length_ranges_are_refused(
    main: Callable[[Sequence[str]], int], flags: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(flags.split())


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (floor, "--requests 0"),
        (floor, "--shared-prefix -1"),
        (floor, "--tp 0"),
        (floor, "--bandwidth nan"),
        (floor, "--budget 0"),
        (simulate, "--trace never-opened --requests 0"),
        (simulate, "--rate nan"),
        (simulate, "--time-scale inf"),
        (simulate, "--num-pages 0"),
        (simulate, "--max-running-requests 0"),
        (simulate, "--target-step-ms -1"),
        (scheduler, "--running 0"),
        (step, "--batch 0"),
        (server, "--tokens 0"),
        (online, "--url http://127.0.0.1:1 --rate -1"),
        (online, "--url http://127.0.0.1:1 --json /nowhere/x.json"),
        (online, "--url http://127.0.0.1:1 --plot /"),
    ],
)
def test_a_flag_out_of_range_is_refused_by_its_name(
    main: Callable[[Sequence[str]], int], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: such flags ended in tracebacks, the last two after the run, or never ended."""
    with pytest.raises(SystemExit):
        main(flags.split())
    assert f"argument {flags.split()[-2]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--url nonsense", "nonsense/v1/models cannot be read"),
        ("--url http://127.0.0.1:x", "cannot be read"),
        (
            "--url http://127.0.0.1:1 -- --tp 2",
            "flags after -- are for the server that --model starts",
        ),
    ],
)
def test_an_unreachable_server_gives_one_sentence(flags: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        online(flags.split())


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    """Regression: an empty trace was a successful run without requests."""
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    with pytest.raises(ConfigError, match=r"trace\.jsonl has no requests"):
        simulate(["--trace", str(trace)])


def test_the_reason_of_failed_simulated_requests_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate(["--requests", "2", "--num-pages", "1"]) == 1
    assert "error: " in capsys.readouterr().out
