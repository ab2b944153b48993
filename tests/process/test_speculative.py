"""A server with --speculative gives the choices, stops and usage of a server without it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process.harness import DEADLINE_S, ServerProcess, run_server

pytestmark = pytest.mark.process

CODE = "def add(a, b):\n    return a + b\n" * 4
BODIES: list[dict[str, Any]] = [
    {"prompt": CODE, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
    {"prompt": CODE, "max_tokens": 20, "temperature": 0.8, "seed": 4, "n": 2},
    {"prompt": "a b c a b c a b", "max_tokens": 20, "temperature": 0, "stop": [" b", "e"]},
    {"prompt": "a b c a b c a", "max_tokens": 9, "seed": 1, "logprobs": 1, "ignore_eos": True},
    {
        "prompt": "1 2 1 2 1 2",
        "max_tokens": 12,
        "seed": 1,
        "structured_outputs": {"regex": "[0-9 ]+"},
    },
    {
        "prompt": '[{"a": 12}, {"a": 12}, {"a": 12}, ',
        "max_tokens": 60,
        "temperature": 0.6,
        "seed": 2,
        "n": 2,
        "structured_outputs": {
            "json": {
                "type": "array",
                "items": {"type": "object", "properties": {"a": {"type": "integer"}}},
            }
        },
    },
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    flags = ("--device", "cpu", "--num-pages", "64", "--max-running-requests", "4")
    with run_server(*flags) as plain, run_server(*flags, "--speculative", "ngram") as drafting:
        yield [plain.wait_ready(), drafting.wait_ready()]


@pytest.mark.parametrize("body", BODIES)
def test_answers_are_equal(body: dict[str, Any], servers: list[ServerProcess]) -> None:
    answers = []
    for server in servers:
        url = server.url + "/v1/completions"
        asked = {"model": "minisgl-demo", **body}
        answer = httpx.post(url, json=asked, timeout=DEADLINE_S).raise_for_status().json()
        choices = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        usage = answer["usage"]
        answers.append((choices, usage["prompt_tokens"], usage["completion_tokens"]))
    assert answers[0] == answers[1]


def test_drafts_are_counted_only_with_the_flag(servers: list[ServerProcess]) -> None:
    for server, limit in zip(servers, (0, float("inf")), strict=True):
        counted = {k: v for k, v in server.metrics().items() if "draft_tokens" in k}
        assert len(counted) == 14, "drafted and accepted, for seven positions"
        assert all(0 <= value <= limit for value in counted.values())
