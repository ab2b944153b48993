"""Run with `pydantic-ai-slim[openai]`: python pydantic_ai_client.py URL MODEL."""

import asyncio
import sys
from importlib.metadata import version

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from structured import PRODUCT, QUESTION, Sum, product

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))


def calculator(expression: str) -> str:
    """Compute an expression."""
    return product(expression)


async def streamed(agent: Agent, question: str) -> object:
    """The output of a streamed run."""
    async with agent.run_stream(question) as run:
        return await run.get_output()


async def main() -> None:
    """One tool round and both enforced output modes, streamed and not."""
    agent = Agent(model, tools=[calculator])
    expected = f"The result is {product('4821 * 377')}."
    assert (await agent.run(PRODUCT)).output == expected
    assert await streamed(agent, PRODUCT) == expected
    for mode in (NativeOutput, ToolOutput):
        agent = Agent(model, output_type=mode(Sum), retries=0)
        assert isinstance((await agent.run(QUESTION)).output, Sum), mode
        assert isinstance(await streamed(agent, QUESTION), Sum), mode


asyncio.run(main())
sys.stdout.write(f"pydantic-ai-slim {version('pydantic-ai-slim')}\n")
