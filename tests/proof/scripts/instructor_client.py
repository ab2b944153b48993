"""Run with `instructor`: python instructor_client.py URL MODEL."""

import sys
from importlib.metadata import version

import instructor
from openai import OpenAI
from structured import QUESTION, Sum

url, model = sys.argv[1:]
modes = instructor.Mode
for mode in (modes.JSON_SCHEMA, modes.TOOLS):
    client = instructor.from_openai(OpenAI(base_url=url + "/v1", api_key="none"), mode=mode)
    given = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    found = client.chat.completions.create(**given, response_model=Sum, max_retries=0)
    assert isinstance(found, Sum), found
sys.stdout.write(f"instructor {version('instructor')}\n")
