"""Validation: every body becomes a complete request, or an error that names the field at fault."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.core import InvalidRequest, ModelNotFound, PromptTooLong, RequestError, Unsupported
from minisgl.message.messages import DecodeIds, TokenizeChat, TokenizeText
from minisgl.protocol.requests import (
    CHAT,
    COMPLETIONS,
    PARAMETERS,
    RESPONSES,
    ChatBody,
    CompletionBody,
)
from minisgl.request.convert import CallRequest, RequestConverter
from minisgl.request.fit import fit_max_tokens
from minisgl.request.question import Question
from minisgl.server.errors import error_reply
from minisgl.settings import Limits
from tests.unit.server.fakes import CONFIG, FACTS

MESSAGES = [{"role": "user", "content": "hi"}]


def read(route: str = CHAT, config: Any = CONFIG, facts: Any = FACTS, **body: Any) -> Any:
    base = {"messages": MESSAGES} if route == CHAT else {"prompt": "hi"}
    raw = json.dumps({"model": "m", **base, **body}).encode()
    return RequestConverter(config).read(route, raw, facts)


def rendered(**body: Any) -> Any:
    ((_, prompt),) = read(**body).prompts
    assert isinstance(prompt, TokenizeChat)
    return json.loads(prompt.messages_json)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
NAMES = sorted(
    {
        *ChatBody.__struct_fields__,
        *CompletionBody.__struct_fields__,
        *PARAMETERS.ignored,
        *PARAMETERS.unsupported,
    }
)


@given(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), JSON, max_size=5),
)
def test_any_body_gives_a_request_or_a_4xx(route: str, body: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model": "m", "messages": MESSAGES}
    if route == COMPLETIONS:
        base = {"model": "m", "prompt": "hi"}
    raw = json.dumps({**base, **body}).encode("utf-8", "surrogatepass")
    try:
        request = RequestConverter(CONFIG).read(route, raw, FACTS)
    except RequestError as error:
        reply = error_reply(error)
        assert 400 <= reply.status < 500
        assert len(reply.body) < 2000, "the input is not echoed in full"
    else:
        request.sampling.validate()
        msgspec.msgpack.encode(request.sampling)


@given(st.binary(max_size=60))
def test_any_bytes_give_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        RequestConverter(CONFIG).read(CHAT, raw, FACTS)


ARGUMENTS = st.text(max_size=9) | JSON.map(json.dumps)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": ARGUMENTS})}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": JSON | st.text(max_size=9),
        "tool_calls": JSON | st.lists(CALL, max_size=2),
        "name": JSON,
    },
)


@given(st.lists(MESSAGE, max_size=3))
@example([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1e30"}}]}])
def test_any_messages_give_a_chat_or_a_4xx(messages: list[Any]) -> None:
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    statuses = []
    try:
        ((_, prompt),) = RequestConverter(CONFIG).read(CHAT, raw, FACTS).prompts
    except RequestError as error:
        statuses.append(error_reply(error).status)
    else:
        assert isinstance(prompt, TokenizeChat)
        json.loads(prompt.messages_json)
    assert all(400 <= status < 500 for status in statuses)


def test_huge_number_in_tool_arguments_is_a_4xx_or_kept() -> None:
    arguments = json.dumps({"x": 10**40})
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = rendered(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 10**40}


@pytest.mark.parametrize("name", sorted(PARAMETERS.ignored))
def test_ignored_parameters_do_not_change_the_request(name: str) -> None:
    assert read(**{name: {"any": "thing"}}) == read()


@pytest.mark.parametrize("name", sorted(PARAMETERS.unsupported))
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    with pytest.raises((Unsupported, InvalidRequest)) as caught:
        read(COMPLETIONS, **{name: {"x": 1}})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", False),
        ("presence_penalty", 0),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("suffix", None),
        ("modalities", ["text"]),
    ],
)
def test_unsupported_parameters_may_have_neutral_values(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()


def test_grammars_can_be_switched_off() -> None:
    config = msgspec.structs.replace(CONFIG, no_grammars=True)
    for name in ("regex", "ebnf", "guided_grammar"):
        error = refusal(config=config, **{name: "a"})
        assert (type(error), error.param) == (Unsupported, name)
    assert read(config=config, guided_json={}).grammar
    assert read(regex="a").grammar


def test_tools_need_a_model_that_knows_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read(tools=tools, tool_choice="none") == read()
    with pytest.raises(Unsupported):
        read(tools=tools)


def test_unknown_parameter_has_near_names_and_can_be_allowed() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'temperature'") as caught:
        read(temprature=1)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "temprature")
    relaxed = msgspec.structs.replace(CONFIG, allow_unknown_params=True)
    assert read(config=relaxed, temprature=1) == read()
    with pytest.raises(Unsupported):
        read(config=relaxed, best_of=3)


def test_null_counts_as_not_given() -> None:
    assert read(max_tokens=None, stop=None, seed=None, stream=None) == read()


def test_max_completion_tokens_overrides_max_tokens() -> None:
    assert read(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7


def test_sampling_defaults_come_from_the_model_unless_ignored() -> None:
    facts = msgspec.structs.replace(FACTS, sampling_defaults={"temperature": 0.6, "top_k": 20})
    assert read(facts=facts).sampling.temperature == 0.6
    assert read(facts=facts).sampling.top_k == 20
    assert read(facts=facts, temperature=0).sampling.temperature == 0
    plain = msgspec.structs.replace(CONFIG, ignore_generation_config=True)
    assert read(facts=facts, config=plain).sampling.temperature == 1
    assert read(facts=facts, config=plain).sampling.top_k == -1


def test_developer_becomes_system_and_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert rendered(messages=messages) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
    ]


def test_tool_history_has_parsed_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    assert rendered(messages=messages)[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_fields_that_clients_add_to_answers_are_left_out() -> None:
    """Regression: `parsed` (openai) and `provider_specific_fields` (litellm) were a 400."""
    function = {"name": "f", "arguments": '{"x": 1}', "parsed_arguments": {"x": 1}}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": '{"y": 2}', "parsed": {"y": 2}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    _, answer, calls, _ = rendered(messages=messages)
    assert answer == {"role": "assistant", "content": '{"y": 2}'}
    assert set(calls) == {"role", "content", "tool_calls"}
    assert calls["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


PART = {"type": "text", "text": "a"}
CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("entries", [{"content": [PART]}, {"tool_calls": [CALL]}], ids=list)
def test_parts_and_tool_calls_are_bounded_in_all(entries: dict[str, list[Any]]) -> None:
    """Regression: a body with 1,024 parts per message blocked the event loop for 2.5 to 4 s."""
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_messages=5))
    ((name, (entry,)),) = entries.items()
    two = {"role": "assistant", name: [entry, entry]}
    assert len(read(config=config, messages=[two, two]).prompts) == 1
    with pytest.raises(InvalidRequest) as caught:
        read(config=config, messages=[two, two, two])
    assert (caught.value.param, caught.value.limit) == ("messages", "max_messages")


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), ([1, 2], 1), (["a", "b"], 2), ([[1], [2, 3], "c"], 3)]
)
def test_each_form_of_a_prompt_is_read(prompt: Any, count: int) -> None:
    assert len(read(COMPLETIONS, prompt=prompt).prompts) == count


@pytest.mark.parametrize("bad", [True, -1, 1.0, FACTS.vocab_size, None, "a"])
def test_the_token_id_at_fault_is_named(bad: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(COMPLETIONS, prompt=[0, bad, 1])
    assert caught.value.param == "prompt[1]"


def test_prompt_characters_are_bounded_before_tokenizing() -> None:
    with pytest.raises(PromptTooLong):
        read(COMPLETIONS, prompt="x" * (32 * FACTS.max_seq_len + 1))
    limits = Limits(max_prompt_chars=3)
    with pytest.raises(PromptTooLong):
        read(config=msgspec.structs.replace(CONFIG, limits=limits), messages=[*MESSAGES] * 2)


def test_max_tokens_must_fit_into_context_and_pool() -> None:
    from array import array

    ids = array("i", [1] * 70)  # the pool holds 80 tokens, the context is 100

    def fit(request: CallRequest) -> int | None:
        return fit_max_tokens(request, ids, FACTS, "prompt")

    assert fit(read(COMPLETIONS)) == 10, "the implicit 16 shrink to the room"
    assert fit(read(COMPLETIONS, max_tokens=10)) == 10
    with pytest.raises(PromptTooLong, match=r"max_tokens is 11.* at most 10 are left") as refused:
        fit(read(COMPLETIONS, max_tokens=11))
    assert refused.value.param == "max_tokens"
    assert fit(read(max_completion_tokens=11)) == 10, "agents send a fixed limit with each chat"
    strict = RequestConverter(msgspec.structs.replace(CONFIG, strict_max_tokens=True))
    body = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 11}
    with pytest.raises(PromptTooLong) as refused:
        fit(strict.read(CHAT, json.dumps(body).encode(), FACTS))
    assert refused.value.param == "max_completion_tokens"
    with pytest.raises(PromptTooLong) as refused:
        fit_max_tokens(read(), array("i", [1] * 80), FACTS, "messages")
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="no tokens"):
        fit_max_tokens(read(), array("i"), FACTS, "messages")


def refusal(route: str = CHAT, config: Any = CONFIG, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(route, config, **body)
    return caught.value


def message(**fields: Any) -> list[Any]:
    return [*MESSAGES, {"role": "user", "content": "x", **fields}]


@pytest.mark.parametrize(
    ("body", "param", "kind"),
    [
        ({"temperature": 3}, "temperature", InvalidRequest),
        ({"temperature": True}, "temperature", InvalidRequest),
        ({"max_tokens": 1.0}, "max_tokens", InvalidRequest),
        ({"seed": 2**63}, "seed", InvalidRequest),
        ({"seed": 10**40}, "seed", InvalidRequest),
        ({"stop": ["a", ""]}, "stop[1]", InvalidRequest),
        ({"stop": 5}, "stop", InvalidRequest),
        ({"logit_bias": {"1": 1, "2": 101}}, "logit_bias.2", InvalidRequest),
        ({"logit_bias": {"x": 1}}, "logit_bias", InvalidRequest),
        ({"logit_bias": {"-1": 1}}, "logit_bias", InvalidRequest),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", InvalidRequest),
        ({"stream_options": {}}, "stream_options", InvalidRequest),
        ({"chat_template_kwargs": {"thinkin": 1}}, "chat_template_kwargs", InvalidRequest),
        ({"messages": None}, "messages", InvalidRequest),
        ({"messages": []}, "messages", InvalidRequest),
        ({"messages": message(role="root")}, "messages[1].role", InvalidRequest),
        ({"messages": message(content=None)}, "messages[1].content", InvalidRequest),
        ({"messages": message(zoo=1)}, "messages[1]", InvalidRequest),
        ({"messages": message(content=[{"type": "text"}])}, "messages[1].content[0].text", None),
        ({"messages": message(content=[{"type": "image"}])}, "messages[1].content[0]", Unsupported),
        ({"messages": message(content=[{"zoo": 1}])}, "messages[1].content[0]", Unsupported),
        ({"messages": message(audio={"id": "a"})}, "messages[1].audio", Unsupported),
        ({"messages": message(tool_calls=[CALL])}, "messages[1].tool_calls", InvalidRequest),
    ],
)
def test_refusal_names_the_path_of_the_field(body: Any, param: str, kind: Any) -> None:
    error = refusal(**body)
    assert (error.param, type(error)) == (param, kind or InvalidRequest)
    assert param in error.message


def test_unknown_field_of_a_message_has_a_near_name() -> None:
    assert "did you mean 'content'" in refusal(messages=message(contnt="a")).message


def test_no_refusal_repeats_a_long_value() -> None:
    for body in ({"messages": message(role="x" * 5000)}, {"x" * 5000: 1}, {"stop": "x" * 5000}):
        assert len(refusal(**body).message) < 300


@pytest.mark.parametrize(
    ("route", "body", "limit"),
    [
        (CHAT, {"n": 9}, "max_n"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "max_prompts"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 3}, "max_choices"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "n": 9}, "max_choices"),
        (CHAT, {"messages": MESSAGES * 6}, "max_messages"),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, "max_logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "max_logprobs"),
        (CHAT, {"logit_bias": {"1": 1, "2": 1, "3": 1}}, "max_logit_bias"),
        (CHAT, {"stop": ["a"] * 17}, "max_stop_strings"),
        (CHAT, {"stop": ["a" * 257]}, "max_stop_chars"),
        (CHAT, {"stop_token_ids": [1] * 129}, "max_stop_token_ids"),
    ],
)
def test_refusal_of_a_limit_has_its_label(route: str, body: Any, limit: str) -> None:
    limits = Limits(max_choices=8, max_messages=5, max_logprobs=2, max_logit_bias=2)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    assert refusal(route, config, **body).limit == limit


def test_bodies_of_the_other_routes() -> None:
    converter = RequestConverter(CONFIG)
    raw = b'{"prompt":"a","add_special_tokens":false,"return_token_strs":true}'
    expected = (Question(TokenizeText(text="a", add_special=False), "prompt"), True)
    assert converter.read_tokenize(raw, FACTS) == expected
    chat, _ = converter.read_tokenize(json.dumps({"messages": MESSAGES}).encode(), FACTS)
    assert chat.param == "messages"
    expected_ids = Question(DecodeIds(token_ids=b"\1\0\0\0\2\0\0\0", skip_special=False))
    assert converter.read_detokenize(b'{"tokens":[1,2]}', FACTS) == expected_ids
    assert converter.read_abort(b'{"request_id":"x"}') == "x"
    for raw in (b"{}", b'{"prompt":"a","messages":[{"role":"user","content":"b"}]}'):
        with pytest.raises(InvalidRequest, match="either prompt or messages"):
            converter.read_tokenize(raw, FACTS)
    with pytest.raises(InvalidRequest) as caught:
        converter.read_detokenize(b'{"tokens":[1],"token":[2]}', FACTS)
    assert (caught.value.param, caught.value.code) == ("token", "unknown_parameter")
    with pytest.raises(ModelNotFound):
        converter.read_tokenize(b'{"prompt":"a","model":"other"}', FACTS)


def test_arguments_of_any_depth_are_converted_or_refused() -> None:
    """Near the recursion limit, arguments that were read may be too deep to be written again."""
    for depth in range(800, 1000):
        call = {"type": "function_call", "name": "f", "arguments": "[" * depth + "]" * depth}
        raw = json.dumps({"model": "m", "input": [call]}).encode()
        with contextlib.suppress(InvalidRequest):
            RequestConverter(CONFIG).read(RESPONSES, raw, FACTS)
