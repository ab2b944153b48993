"""Run with `litellm`: python litellm_client.py URL MODEL."""

import sys
from importlib.metadata import version

import litellm
from structured import QUESTION, Sum

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
sys.stdout.write(f"litellm {version('litellm')}\n")
