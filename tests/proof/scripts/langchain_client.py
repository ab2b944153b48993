"""Run with `langchain-openai`: python langchain_client.py URL MODEL."""

import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from structured import PRODUCT, QUESTION, Sum, product

url, model = sys.argv[1:]
given = {"base_url": url + "/v1", "api_key": "none", "model": model, "temperature": 0}
chat = ChatOpenAI(**given)
answer = chat.invoke("What is 20 plus 2?")
assert answer.content == "22", answer
assert answer.usage_metadata["total_tokens"] > 2
assert "".join(chunk.content for chunk in chat.stream("What is 20 plus 2?")) == "22"
assert len(chat.batch(["20 plus 2?", "Hello!"])) == 2
assert OpenAI(**given, max_tokens=4).invoke("one two three")
for method in ("json_schema", "function_calling"):
    bound = chat.with_structured_output(Sum, method=method, strict=True)
    assert isinstance(bound.invoke(QUESTION), Sum)
    assert isinstance(list(bound.stream(QUESTION))[-1], Sum)


@tool
def calculator(expression: str) -> str:
    """Compute an expression."""
    return product(expression)


bound = chat.bind_tools([calculator])
(call,) = bound.invoke(PRODUCT).tool_calls
parts = list(bound.stream(PRODUCT))
answer = sum(parts[1:], parts[0])
assert [c["args"] for c in answer.tool_calls] == [call["args"]], answer
answer = bound.invoke([HumanMessage(PRODUCT), answer, calculator.invoke(answer.tool_calls[0])])
assert answer.content == f"The result is {product(call['args']['expression'])}.", answer
sys.stdout.write(f"langchain-openai {version('langchain-openai')}\n")
