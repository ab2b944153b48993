"""Run with `instructor`: python instructor_client.py URL MODEL."""

import sys
from importlib.metadata import version

import instructor
from openai import OpenAI
from structured import QUESTION, Sum

url, model = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=url + "/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
)
found = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": QUESTION}], response_model=Sum
)
assert isinstance(found, Sum), found
sys.stdout.write(f"instructor {version('instructor')}\n")
