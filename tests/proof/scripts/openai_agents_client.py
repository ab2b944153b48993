"""Run with `openai-agents`: python openai_agents_client.py URL MODEL."""

import asyncio
import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from structured import PRODUCT, QUESTION, Sum, product

url, name = sys.argv[1:]


@function_tool
def calculator(expression: str) -> str:
    """Compute an expression."""
    return product(expression)


async def main() -> None:
    """One tool round, streamed and not, a handoff and an output type."""
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=name, openai_client=client)
    agent = Agent(name="math", model=model, tools=[calculator])
    expected = f"The result is {product('4821 * 377')}."
    assert (await Runner.run(agent, PRODUCT, max_turns=3)).final_output == expected
    streamed = Runner.run_streamed(agent, PRODUCT, max_turns=3)
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output == expected
    settings = ModelSettings(tool_choice="transfer_to_math")
    first = Agent(name="first", model=model, handoffs=[agent], model_settings=settings)
    assert (await Runner.run(first, PRODUCT, max_turns=4)).last_agent is agent
    typed = Agent(name="typed", model=model, output_type=Sum)
    assert isinstance((await Runner.run(typed, QUESTION)).final_output, Sum)


set_tracing_disabled(True)
asyncio.run(main())
sys.stdout.write(f"openai-agents {version('openai-agents')}\n")
