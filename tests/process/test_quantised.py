"""The server with --quantization fp8 answers a prompt of the demo model."""

import pytest
from openai import OpenAI

from tests.process.harness import run_server

pytestmark = pytest.mark.process

QUESTION = "What is 47 plus 25?"


def test_a_server_with_fp8_weights_answers() -> None:
    with run_server("--quantization", "fp8") as server:
        server.wait_ready()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
        )
    assert answer.choices[0].message.content == "72"
