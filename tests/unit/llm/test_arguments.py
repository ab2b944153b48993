"""Arguments of LLM as users of the HTTP API and of other engines write them."""

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.core import InvalidRequest, SamplingParams, Unsupported
from minisgl.llm import LLM, Completion

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=64) as llm:
        yield llm


def one(found: Completion | list[Completion]) -> Completion:
    assert isinstance(found, Completion)
    return found


def test_text_parts_are_joined_as_in_the_server(llm: LLM) -> None:
    """Regression: the template of the demo model failed with an error of Python."""
    parts = [{"type": "text", "text": text} for text in ("What is", "12 + 30?")]
    joined = [{"role": "user", "content": "What is\n12 + 30?"}]
    found = llm.chat([{"role": "user", "content": parts}], GREEDY, progress=False)
    assert one(found).text == one(llm.chat(joined, GREEDY, progress=False)).text
    with pytest.raises(Unsupported, match=r"messages\[0\]\.content\[0\]: parts of type 'file'"):
        llm.chat([{"role": "user", "content": [{"type": "file"}]}], GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": {"temperature": 0.3, "top_k": 2}}, "entries of a dict by name"),
        ({"sampling_params": GREEDY}, "no parameter 'sampling_params'; did you mean 'sampling'"),
        ({"max_new_tokens": 3}, "no parameter 'max_new_tokens'; did you mean 'max_tokens'"),
        ({"template_options": 5}, "template_options must be a dict"),
    ],
)
def test_arguments_of_other_engines_are_named(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.chat(CHAT, progress=False, **arguments)
