"""URL MODEL QUESTION ANSWER: a tool round of openai-agents, pydantic-ai and litellm.

The clients use Responses and Messages, whole and streamed.
"""

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import agents
import litellm
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL, QUESTION, ANSWER = sys.argv[1:]
KEY = "none"
calls: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append((a, b))
    return a + b


async def openai_agents() -> None:
    client = AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add)])
    done = await agents.Runner.run(agent, QUESTION)
    assert done.final_output == ANSWER
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == ANSWER


async def pydantic_ai() -> None:
    models: list[Any] = [
        OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY)),
        AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
    ]
    for model in models:
        agent = Agent(model, tools=[add])
        assert (await agent.run(QUESTION)).output == ANSWER
        async with agent.run_stream(QUESTION) as result:
            assert await result.get_output() == ANSWER


TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def litellm_bridges() -> None:
    ours: Any = {"model": f"openai/{MODEL}", "api_base": URL + "/v1", "api_key": KEY}
    answer: Any = litellm.responses(input=QUESTION, tools=[TOOL], **ours)
    assert answer.output[-1].name == "add"
    events: Any = litellm.responses(input=QUESTION, tools=[TOOL], stream=True, **ours)
    assert [event.type for event in events][-1] == "response.completed"
    theirs: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}
    tools = [{"type": "function", "function": {k: TOOL[k] for k in ("name", "parameters")}}]
    messages = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(messages=messages, tools=tools, **theirs)
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks: Any = litellm.completion(messages=messages, tools=tools, stream=True, **theirs)
    answer = litellm.stream_chunk_builder(list(chunks), messages=messages)
    assert answer.choices[0].message.tool_calls[0].function.name == "add"


async def main() -> None:
    await openai_agents()
    await pydantic_ai()
    assert calls == [(2, 3)] * 6, calls


asyncio.run(main())
litellm_bridges()
for name in ("openai-agents", "pydantic-ai-slim", "litellm", "openai", "anthropic"):
    sys.stdout.write(f"{name} {version(name)}\n")
