"""The effect of each parameter over HTTP, with a real engine. tests/parity checks the values."""

import itertools
import math
from typing import Any

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess

pytestmark = pytest.mark.process

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."


def post(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=patience())
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    """The first choice of a greedy completion."""
    given = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body}
    return dict(post(server, "/v1/completions", **given)["choices"][0])


def test_chat_logprobs_have_bytes_and_the_requested_number_of_top_tokens(
    real_server: ServerProcess,
) -> None:
    answer = real_server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode("utf-8", "replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_streamed_logprobs_are_those_of_the_whole_answer(real_server: ServerProcess) -> None:
    client = real_server.client()
    params: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "seed": 5}
    whole = client.completions.create(**params, logprobs=2).choices[0]
    assert whole.logprobs is not None
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    text = ""
    for chunk in client.completions.create(**params, logprobs=2, stream=True):
        (choice,) = chunk.choices
        text += choice.text
        if choice.logprobs:
            tokens += choice.logprobs.tokens or []
            values += choice.logprobs.token_logprobs or []
            offsets += choice.logprobs.text_offset or []
    assert (text, tokens) == (whole.text, whole.logprobs.tokens)
    assert values == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    assert offsets == whole.logprobs.text_offset


def test_logprobs_end_where_a_stop_string_cuts_the_text(real_server: ServerProcess) -> None:
    whole = complete(real_server, max_tokens=12, logprobs=0, ignore_eos=True)
    tokens = whole["logprobs"]["tokens"]
    texts = list(itertools.takewhile(lambda token: not token.startswith("bytes:"), tokens))
    stop = texts[-1]
    assert "".join(texts).find(stop) == len("".join(texts[:-1])) > 0, "the text must have one stop"
    cut = complete(real_server, max_tokens=12, logprobs=0, ignore_eos=True, stop=[stop])
    assert cut["finish_reason"] == "stop"
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]
    kept = complete(
        real_server,
        max_tokens=12,
        logprobs=0,
        ignore_eos=True,
        stop=[stop],
        include_stop_str_in_output=True,
    )
    assert kept["text"] == cut["text"] + stop == "".join(kept["logprobs"]["tokens"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(
    real_server: ServerProcess, max_tokens: int, stream: bool
) -> None:
    """lm-eval computes a loglikelihood like this. The prefix cache does not change the values."""
    for _ in range(2):
        usage = post(real_server, "/v1/completions", prompt=PROMPT, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the prompt is in the cache now"
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    client = real_server.client()
    answers = []
    for salt in ("", "fresh"):
        extra = {"cache_salt": salt}
        if stream:
            chunks = list(
                client.completions.create(
                    **body, echo=True, logprobs=1, stream=True, extra_body=extra
                )
            )
            parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
            text = "".join(chunk.choices[0].text for chunk in chunks)
            tokens = [token for part in parts for token in part.tokens or []]
            values = [value for part in parts for value in part.token_logprobs or []]
            tops = [top for part in parts for top in part.top_logprobs or []]
        else:
            whole = client.completions.create(**body, echo=True, logprobs=1, extra_body=extra)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == max_tokens
            (choice,) = whole.choices
            assert choice.finish_reason == "length"
            assert choice.logprobs is not None
            text, tokens = choice.text, choice.logprobs.tokens or []
            values, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
            assert choice.logprobs.text_offset == [
                sum(map(len, tokens[:i])) for i in range(len(tokens))
            ]
        assert "".join(tokens) == text
        assert text.startswith(PROMPT)
        assert (values[0], tops[0]) == (None, None)
        assert all(
            value <= max(top.values()) for value, top in zip(values[1:], tops[1:], strict=False)
        )
        answers.append((tokens, values[1:]))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == pytest.approx(answers[1][1], abs=1e-4)


def test_logit_bias_forces_and_forbids(real_server: ServerProcess) -> None:
    forced = complete(real_server, logit_bias={"40": 100}, return_token_ids=True)
    assert forced["token_ids"] == [40] * 6
    plain = complete(real_server, return_token_ids=True, ignore_eos=True)
    first = plain["token_ids"][0]
    other = complete(real_server, logit_bias={str(first): -100}, return_token_ids=True)
    assert first not in other["token_ids"]


def test_penalties_end_a_repetition(real_server: ServerProcess) -> None:
    body = {"logit_bias": {"40": 12, "41": 11.5, "42": 11}, "return_token_ids": True}
    plain = complete(real_server, **body)["token_ids"]
    for name, value in (
        ("presence_penalty", 2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 2),
    ):
        assert len(set(complete(real_server, **body, **{name: value})["token_ids"])) > len(
            set(plain)
        )


def test_stop_ids_do_not_count_before_min_tokens(real_server: ServerProcess) -> None:
    body = {"logit_bias": {"40": 100}, "stop_token_ids": [40], "return_token_ids": True}
    assert complete(real_server, **body)["token_ids"] == [40]
    late = complete(real_server, **body, min_tokens=3)
    assert len(late["token_ids"]) == 4
    assert late["token_ids"][-1] == 40
    assert late["finish_reason"] == "stop"


def test_parts_and_tool_history_reach_the_template(real_server: ServerProcess) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "calling", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "three"},
    ]
    tokens = post(real_server, "/tokenize", messages=messages)["tokens"]
    body = {"tokens": tokens, "skip_special_tokens": True}
    text = post(real_server, "/detokenize", **body)["prompt"]
    call_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result_text = "<tool_response>\nthree\n</tool_response>"
    assert text == (
        f"system\nbe brief\nuser\none\ntwo\nassistant\ncalling\n{call_text}\n"
        f"user\n{result_text}\nassistant\n"
    )
    answer = post(real_server, "/v1/chat/completions", messages=messages, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_token_ids_are_accepted_and_returned(real_server: ServerProcess) -> None:
    answer = post(
        real_server, "/generate", input_ids=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True
    )
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 4 == answer["usage"]["completion_tokens"]
    again = complete(real_server, prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)
    assert again["text"] == choice["text"]


def test_requests_with_different_cache_salt_share_no_prefix(real_server: ServerProcess) -> None:
    def cached(salt: str) -> int:
        prompt = [3 + i % 50 for i in range(80)]
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = post(real_server, "/v1/completions", **body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("two"), cached("one")] == [0, 0, 64]


def test_every_number_of_an_answer_is_finite(real_server: ServerProcess) -> None:
    found = complete(real_server, logit_bias={"40": 100}, logprobs=20, echo=True)["logprobs"]
    values = [v for top in found["top_logprobs"][1:] for v in top.values()]
    assert all(math.isfinite(value) for value in values)
    assert all(20 <= len(top) <= 21 for top in found["top_logprobs"][1:])
