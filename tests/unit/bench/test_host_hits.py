"""`python -m bench host_hits` without a server: sizes, the place of a hit, and steps on the CPU."""

import asyncio
import json
from pathlib import Path

import pytest

from bench import hit_requests
from bench.hit_requests import HitRequests
from bench.host_hits import Sizes, main
from minisgl.benchmark.client import Answer
from minisgl.core import ConfigError
from minisgl.demo import model_path
from tests.process.tiny_model import build_tiny_model

PROMPT = 1600


@pytest.mark.parametrize(("tokens", "streams"), [(32768, 64), (512, 2), (16, 1)])
def test_the_rotation_exceeds_the_pool_and_stores_keep_a_prompt_clean(
    tokens: int, streams: int
) -> None:
    sizes = Sizes.of(tokens, streams)
    assert (sizes.prompts - 1) * sizes.prompt >= sizes.pool
    assert sizes.pool // 8 >= sizes.prompt
    assert sizes.host + sizes.pool >= sizes.prompts * sizes.prompt + sizes.pool // 8


@pytest.mark.parametrize(
    ("cached", "loaded", "on_host", "is_hit"),
    [
        (1584, 1584, True, True),
        (1584, 0, False, True),
        (1584, 0, True, False),  # the prefix was on the GPU
        (1584, 16, False, False),  # a part of the prefix was in host memory
        (0, 0, True, False),
        (800, 0, False, False),
    ],
)
def test_a_prompt_in_another_place_is_an_error(
    cached: int, loaded: int, on_host: bool, is_hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, copied = "minisgl_host_cache_hit_tokens_total", "minisgl_host_cache_copied_bytes_total:"
    first = {name: 100.0, copied + "to_host": 7.0, copied + "to_gpu": 7.0}
    scrapes = iter([first, first | {name: 100.0 + loaded, copied + "to_gpu": 9.0}])
    monkeypatch.setattr(hit_requests, "read_metrics", lambda url: next(scrapes))
    monkeypatch.setattr(hit_requests, "_SCRAPE_S", 0.0)
    answer = Answer(0.0, prompt_tokens=PROMPT, cached_tokens=cached)

    async def send() -> list[Answer]:
        return [answer]

    bench = HitRequests("http://localhost:1", "m", 100)
    if not is_hit:
        with pytest.raises(ConfigError, match=f"of 1,600 prompt tokens {cached:,} were cached"):
            asyncio.run(bench.hits(send, on_host))
        return
    answers, moved = asyncio.run(bench.hits(send, on_host))
    assert answers == [answer]
    assert moved == {"to_host": 0.0, "to_gpu": 2.0}


def test_a_prompt_shorter_than_a_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it ended in a ZeroDivisionError."""
    with pytest.raises(SystemExit):
        main(["--model", str(model_path()), "--prompt", "15"])
    assert "--prompt 15: give a page of 16 tokens or more" in capsys.readouterr().err


def test_steps_run_beside_copies_of_each_direction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--part", "steps", "--streams", "1", "--steps", "2"]
    assert main(["--model", str(build_tiny_model(tmp_path)), *flags]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ways = [[way for way in ("to_host", "to_gpu") if row.get(way, 0) > 0] for row in rows]
    assert ways == [[], ["to_host"], ["to_gpu"], ["to_host", "to_gpu"]]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)
    assert rows[0]["ratio"] == 1
