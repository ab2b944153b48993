"""Run with `litellm`: python litellm_client.py URL MODEL."""

import sys
from importlib.metadata import version

import litellm
from structured import PRODUCT, QUESTION, Calculator, Sum, product

url, model = sys.argv[1:]
given = {"model": f"openai/{model}", "api_base": url + "/v1", "api_key": "none", "temperature": 0}
chat = [{"role": "user", "content": "What is 20 plus 2?"}]
answer = litellm.completion(messages=chat, **given)
assert answer.choices[0].message.content == "22", answer
parts = litellm.completion(messages=chat, stream=True, **given)
assert "".join(part.choices[0].delta.content or "" for part in parts) == "22"
try:
    litellm.completion(messages=chat, **{**given, "model": "openai/none"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was taken")
text = litellm.text_completion(
    **{**given, "model": f"text-completion-openai/{model}"}, prompt="one two", max_tokens=3
)
assert text.choices[0].text
bound = litellm.completion(
    **given, messages=[{"role": "user", "content": QUESTION}], response_format=Sum
)
assert isinstance(Sum.model_validate_json(bound.choices[0].message.content), Sum)
function = {"name": "calculator", "parameters": Calculator.model_json_schema()}
tools = [{"type": "function", "function": function}]
for streamed in (False, True):
    messages = [{"role": "user", "content": PRODUCT}]
    answer = litellm.completion(**given, messages=messages, tools=tools, stream=streamed)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    result = product(Calculator.model_validate_json(call.function.arguments).expression)
    tool = {"role": "tool", "tool_call_id": call.id, "content": result}
    messages += [answer.choices[0].message, tool]
    answer = litellm.completion(**given, messages=messages, tools=tools)
    assert answer.choices[0].message.content == f"The result is {result}.", answer
sys.stdout.write(f"litellm {version('litellm')}\n")
