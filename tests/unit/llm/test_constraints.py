"""Constraints of SamplingParams in LLM, on the demo model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from minisgl.core import InvalidRequest, SamplingParams
from minisgl.llm import LLM


class Person(BaseModel):
    name: str = Field(max_length=10)
    likes_tea: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", num_pages=256) as found:
        yield found


def answer(llm: LLM, **constraint: Any) -> str:
    params = SamplingParams(temperature=1, seed=4, max_tokens=200, **constraint)
    found = llm.chat([{"role": "user", "content": "Hello"}], params, progress=False)
    assert not isinstance(found, list)
    assert found.finish_reason == "stop"
    return found.text


@pytest.mark.parametrize("as_text", [False, True])
def test_schema(llm: LLM, as_text: bool) -> None:
    schema = Person.model_json_schema()
    text = answer(llm, json_schema=json.dumps(schema) if as_text else schema)
    assert isinstance(Person.model_validate_json(text), Person)


def test_pydantic_model_is_a_schema(llm: LLM) -> None:
    assert isinstance(Person.model_validate_json(answer(llm, json_schema=Person)), Person)


def test_prompts_with_one_constraint_describe_its_schema_once(llm: LLM) -> None:
    """Regression: the schema of 10,000 prompts was made 10,000 times."""
    described = []

    class Counted(Person):
        @classmethod
        def model_json_schema(cls, **_: Any) -> dict[str, Any]:  # type: ignore[override]
            described.append(cls)
            return Person.model_json_schema()

    params = SamplingParams(temperature=1, seed=4, max_tokens=2, json_schema=Counted)
    llm.generate(["a", "b", "c"], params, progress=False)
    assert len(described) == 1


def test_regex_choice_and_grammar(llm: LLM) -> None:
    assert re.fullmatch("[a-f]{3}-[0-9]", answer(llm, regex="[a-f]{3}-[0-9]"))
    assert answer(llm, choice=("left", "right")) in ("left", "right")
    assert answer(llm, grammar='start: "up" | "down"') in ("up", "down")
    assert answer(llm, grammar='root ::= "up" | "down"') in ("up", "down")


def test_prompts_with_and_without_constraint_run_together(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=6)
    bound = SamplingParams(temperature=0, max_tokens=6, choice=("yes", "no"))
    together = llm.generate(["one two"] * 4, [free, bound, free, bound], progress=False)
    alone = llm.generate("one two", free, progress=False)
    assert isinstance(together, list)
    assert not isinstance(alone, list)
    assert [one.text for one in together[::2]] == [alone.text] * 2
    assert {one.text for one in together[1::2]} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": "a", "choice": ("a",)}, "regex and choice are alternatives"),
        ({"json_schema": {"not": {}}}, "json_schema/not: Unimplemented keys"),
        ({"json_schema": object()}, "json_schema is not JSON"),
        ({"regex": "("}, "regex: "),
        ({"choice": 3}, "choice must hold one or more texts"),
    ],
)
def test_refused(llm: LLM, constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        answer(llm, **constraint)
