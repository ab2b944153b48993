"""Input of hostile and broken clients gets a 4xx from the real server and harms nothing else.

After every case livez is 200; after each family a good request succeeds and no page is lost.
"""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.protocol.requests import (
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    PARAMETERS,
)
from tests.examples import examples
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", GENERATE: "/generate"}
ADMIN = {"authorization": "Bearer root"}
NASTY_TEXT = st.sampled_from(
    ["", "\0", "\ud800", "<|im_end|>" * 50, "x" * 5000, "é" * 100, "\u202e", "{{ 7*7 }}", "[DONE]"]
) | st.text(max_size=20)
NASTY = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1e308, 5e-324, 2**31, 2**63, -(2**64), 10**40, float("nan")])
    | st.floats()
    | st.integers()
    | NASTY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY_TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {name for body in BODIES.values() for name in body.__struct_fields__}
    | PARAMETERS.ignored
    | {*PARAMETERS.unsupported}
)
BOUNDED = settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(tiny_model: Any):
    flags = ("--num-pages", "256", "--admin-api-key", "root", "--max-seq-len-override", "200")
    with run_server("--model", str(tiny_model), *flags, "--max-choices", "4") as found:
        yield found.wait_ready()


@pytest.fixture(autouse=True)
def all_is_well_afterwards(server: ServerProcess):
    yield
    body = {"model": "tiny", "prompt": "a good one", "max_tokens": 2, "temperature": 0}
    assert (
        httpx.post(server.url + "/v1/completions", json=body, timeout=patience()).status_code == 200
    )
    wait_for(lambda: pages_are_whole(server), "idle, with each page free or cached")


def pages_are_whole(server: ServerProcess) -> bool:
    info = httpx.get(server.url + "/server_info", headers=ADMIN, timeout=patience()).json()
    stats = info["stats"]
    assert stats["free_pages"] + stats["evictable_pages"] <= stats["total_pages"] == 256
    idle = info["open_requests"] == 0 and not stats["busy"] and stats["locked_pages"] == 0
    return idle and stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"]


def base(route: str) -> dict[str, Any]:
    prompts = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        GENERATE: {"input_ids": [1, 2]},
    }
    return {"model": "tiny", "max_tokens": 2, **prompts[route]}


def check(server: ServerProcess, path: str, body: bytes, kind: str = "application/json") -> None:
    headers = {"content-type": kind}
    answer = httpx.post(server.url + path, content=body, headers=headers, timeout=patience())
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 2000, "the input is not echoed in full"
    assert server.status("/livez") == 200


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


@BOUNDED
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(NAMES), NASTY, max_size=4))
def test_wrong_values(server: ServerProcess, route: str, changes: dict[str, Any]) -> None:
    check(server, PATHS[route], dumped({**base(route), **changes}))


@BOUNDED
@given(
    st.lists(st.integers(-5, 300) | st.sampled_from([10**9, 2**31, 2**63, True, 1.5]), max_size=9)
)
def test_token_id_prompts(server: ServerProcess, ids: list[Any]) -> None:
    check(server, "/generate", dumped({**base(GENERATE), "input_ids": ids, "echo": True}))
    check(server, "/detokenize", dumped({"tokens": ids}))
    bias = {str(token_id): 1 for token_id in ids}
    check(server, "/v1/completions", dumped({**base(COMPLETIONS), "logit_bias": bias}))


@BOUNDED
@given(
    st.lists(NASTY_TEXT, max_size=3),
    st.integers(-1, 22),
    st.booleans(),
    st.booleans(),
)
def test_stops_logprobs_and_echo(
    server: ServerProcess, stop: list[str], logprobs: int, echo: bool, stream: bool
) -> None:
    more = {"stop": stop, "logprobs": logprobs, "echo": echo, "stream": stream, "min_tokens": 1}
    check(server, "/v1/completions", dumped({**base(COMPLETIONS), **more}))


@BOUNDED
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "root"])},
            optional={"content": NASTY, "name": NASTY, "tool_calls": NASTY},
        ),
        max_size=3,
    ),
    st.dictionaries(
        st.sampled_from(["enable_thinking", "tokenize", "chat_template", "conversation"]), NASTY
    ),
)
def test_chats_and_template_arguments(
    server: ServerProcess, messages: list[Any], options: dict[str, Any]
) -> None:
    body = {**base(CHAT), "messages": messages, "chat_template_kwargs": options}
    check(server, "/v1/chat/completions", dumped(body))
    check(server, "/tokenize", dumped({"messages": messages}))


@BOUNDED
@given(
    st.binary(max_size=60)
    | NASTY.map(dumped)
    | st.integers(1, 5000).map(lambda n: b"[" * n)
    | st.integers(1, 5000).map(lambda n: b'{"a":' * n),
    st.sampled_from(["application/json", "text/plain", "", "multipart/form-data; boundary=x"]),
)
def test_bodies_that_are_no_request(server: ServerProcess, body: bytes, kind: str) -> None:
    for path in (*PATHS.values(), "/tokenize", "/detokenize"):
        check(server, path, body, kind)


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Basic cm9vdA==", "bearer\troot", "Bearer rööt", "x" * 3000]
)
def test_authentication_headers(server: ServerProcess, value: str) -> None:
    headers = {"authorization": value.encode("latin-1")}
    answer = httpx.post(server.url + "/flush_cache", headers=headers, timeout=patience())
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
