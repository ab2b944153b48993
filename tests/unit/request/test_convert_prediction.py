"""`prediction` of a chat: which text goes to the tokenizer, and which forms are refused."""

from typing import Any

import msgspec
import pytest

from minisgl.core import InvalidRequest, PromptTooLong
from tests.unit.request.test_convert import COMPLETIONS, read
from tests.unit.server.fakes import FACTS

DRAFTING = msgspec.structs.replace(FACTS, drafts=True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a b", "a b"),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ("", None),
        ([], None),
    ],
)
def test_prediction_is_text_for_a_server_with_drafts(content: Any, text: str | None) -> None:
    prediction = {"type": "content", "content": content}
    assert read(prediction=prediction).prediction is None
    found = read(prediction=prediction, facts=DRAFTING).prediction
    assert (found and found.text) == text


@pytest.mark.parametrize("facts", [FACTS, DRAFTING])
@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "a", "x": 1}, "prediction"),
        ({"type": "content", "content": "a" * 3201}, "prediction"),
    ],
)
def test_wrong_prediction_is_refused(prediction: Any, param: str, facts: Any) -> None:
    with pytest.raises((InvalidRequest, PromptTooLong)) as error:
        read(prediction=prediction, facts=facts)
    assert (error.value.param or "").startswith(param)


def test_completion_has_no_prediction() -> None:
    with pytest.raises(InvalidRequest, match="prediction"):
        read(COMPLETIONS, prediction={"type": "content", "content": "a"})
