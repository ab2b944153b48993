"""Run with `langchain-openai`: python langchain_client.py URL MODEL."""

import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI, OpenAI
from structured import QUESTION, Sum

url, model = sys.argv[1:]
given = {"base_url": url + "/v1", "api_key": "none", "model": model, "temperature": 0}
chat = ChatOpenAI(**given)
answer = chat.invoke("What is 20 plus 2?")
assert answer.content == "22", answer
assert answer.usage_metadata["total_tokens"] > 2
assert "".join(chunk.content for chunk in chat.stream("What is 20 plus 2?")) == "22"
assert len(chat.batch(["20 plus 2?", "Hello!"])) == 2
assert OpenAI(**given, max_tokens=4).invoke("one two three")
bound = chat.with_structured_output(Sum, method="json_schema")
assert isinstance(bound.invoke(QUESTION), Sum)
assert isinstance(list(bound.stream(QUESTION))[-1], Sum)
sys.stdout.write(f"langchain-openai {version('langchain-openai')}\n")
