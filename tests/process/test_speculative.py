"""A server with --speculative gives the choices, stops and usage of a server without it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess, run_server

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
        answer = httpx.post(url, json=asked, timeout=patience()).raise_for_status().json()
        choices = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        usage = answer["usage"]
        answers.append((choices, usage["prompt_tokens"], usage["completion_tokens"]))
    assert answers[0] == answers[1]


def chat(server: ServerProcess, prediction: Any, **changed: Any) -> dict[str, Any]:
    url = server.url + "/v1/chat/completions"
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    asked = {
        "model": "minisgl-demo",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    if prediction is not None:
        asked["prediction"] = {"type": "content", "content": prediction}
    answer = httpx.post(url, json={**asked, **changed}, timeout=patience()).raise_for_status()
    if not changed.get("stream"):
        return answer.json()
    lines = answer.text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return chunks[-1]


def counts_of(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def tokens_of(server: ServerProcess, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    answer = httpx.post(server.url + "/tokenize", json=body, timeout=patience())
    count: int = answer.raise_for_status().json()["count"]
    return count


def test_predictions_change_no_answer_and_are_counted(servers: list[ServerProcess]) -> None:
    """The tokens of a prediction are accepted or rejected. Without drafts none is counted."""
    plain, drafting = servers
    expected = chat(plain, None)
    text = expected["choices"][0]["message"]["content"]
    half, other = text[: len(text) // 2], "0123456789 " * 20
    parts = [{"type": "text", "text": part} for part in (half, text[len(half) :])]
    cases = [
        (None, "", "none"),
        ("", "", "none"),
        (text, text, "right"),
        (parts, text, "right"),
        (half, half, "half right"),
        ("x" + text + other, "x" + text + other, "right"),
        (other, other, "wrong"),
    ]
    for prediction in (None, text, other):
        answer = chat(plain, prediction)
        assert answer["choices"][0]["message"]["content"] == text
        assert counts_of(answer["usage"]) == (0, 0)
    for index, (prediction, whole, kind) in enumerate(cases):
        size, n = tokens_of(drafting, whole) if whole else 0, 1 + index % 2
        answer = chat(drafting, prediction, n=n)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [text] * n
        accepted, rejected = counts_of(answer["usage"])
        assert accepted + rejected == n * size
        if kind == "right":
            assert accepted > 30 * n
        elif kind == "half right":
            assert 10 * n < accepted <= 30 * n
        else:
            assert accepted < 5 * n


def test_stream_with_a_prediction_has_the_usage_of_a_whole_answer(
    servers: list[ServerProcess],
) -> None:
    drafting = servers[1]
    text = chat(drafting, None)["choices"][0]["message"]["content"]
    middle = len(text) // 2
    for stop in ([], [text[middle : middle + 6]]):
        whole = chat(drafting, text, stop=stop)
        options = {"include_usage": True}
        last = chat(drafting, text, stop=stop, stream=True, stream_options=options)
        assert last["usage"] | {"prompt_tokens_details": 0} == (
            whole["usage"] | {"prompt_tokens_details": 0}
        )
        assert (whole["usage"]["completion_tokens"] < 40) == bool(stop)
        assert counts_of(whole["usage"])[0] > (10 if stop else 30)


def test_drafts_are_counted_only_with_the_flag(servers: list[ServerProcess]) -> None:
    for server, limit in zip(servers, (0, float("inf")), strict=True):
        counted = {k: v for k, v in server.metrics().items() if "draft_tokens" in k}
        assert len(counted) == 14, "drafted and accepted, for seven positions"
        assert all(0 <= value <= limit for value in counted.values())
