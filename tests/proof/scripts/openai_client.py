"""Run with any version of `openai`: python openai_client.py URL MODEL. Exits with 0 on success.

The script uses only features that all versions from 1.109 on have.
"""

import sys

import openai
from structured import PRODUCT, QUESTION, Calculator, Sum, product

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
chat = [{"role": "user", "content": "What is 20 plus 2?"}]

assert [m.id for m in client.models.list()] == [model]
assert client.models.retrieve(model).id == model

whole = client.chat.completions.create(
    model=model, messages=chat, temperature=0, n=2, logprobs=True, top_logprobs=2
)
assert [c.message.content for c in whole.choices] == ["22", "22"]
assert whole.choices[0].finish_reason == "stop"
assert b"".join(bytes(e.bytes) for e in whole.choices[0].logprobs.content) == b"22"
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model=model,
        messages=chat,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "22"
assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens

with client.chat.completions.stream(model=model, messages=chat, temperature=0) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion()
assert "content.done" in kinds
assert final.choices[0].message.content == "22"

text = client.completions.create(
    model=model, prompt=["a b", "c"], max_tokens=2, echo=True, logprobs=1, seed=1
)
assert [c.index for c in text.choices] == [0, 1]
assert text.choices[0].logprobs.token_logprobs[0] is None

raw = client.chat.completions.with_raw_response.create(model=model, messages=chat, max_tokens=1)
assert raw.headers["x-request-id"]

bound = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": QUESTION}], response_format=Sum
)
assert isinstance(bound.choices[0].message.parsed, Sum)
with client.chat.completions.stream(model=model, messages=chat, response_format=Sum) as stream:
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sum)

tools = [openai.pydantic_function_tool(Calculator, name="calculator")]
for streamed in (False, True):
    messages = [{"role": "user", "content": PRODUCT}]
    given = {"model": model, "messages": messages, "tools": tools, "temperature": 0}
    if streamed:
        with client.chat.completions.stream(**given) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds
    else:
        answer = client.chat.completions.parse(**given).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    (call,) = answer.message.tool_calls
    result = product(call.function.parsed_arguments.expression)
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(**given).choices[0]
    assert answer.message.content == f"The result is {result}.", answer

for wrong, kind, param in [
    ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ({"model": "none"}, openai.NotFoundError, "model"),
    ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
    ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
]:
    try:
        client.chat.completions.create(**{"model": model, "messages": chat, **wrong})
        refused = None
    except kind as error:
        refused = error
    assert refused is not None, wrong
    assert refused.param == param, wrong
    assert refused.request_id
sys.stdout.write(f"openai {openai.__version__}\n")
