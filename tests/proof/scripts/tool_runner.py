"""Anthropic's tool runner for Python: python tool_runner.py URL MODEL QUESTION ANSWER."""

import sys

import anthropic
from anthropic import beta_tool


def main(url: str, model: str, question: str, answer: str) -> None:
    calls: list[tuple[int, int]] = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        calls.append((a, b))
        return str(a + b)

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=64,
        tools=[add],
        messages=[{"role": "user", "content": question}],
    )
    *_, last = runner
    text = "".join(block.text for block in last.content if block.type == "text")
    assert (calls, text) == ([(2, 3)], answer), (calls, last)
    assert [entry.id for entry in client.models.list()] == [model]
    print(f"anthropic {anthropic.__version__} (tool runner)")


if __name__ == "__main__":
    main(*sys.argv[1:])
