"""The images of a request: their files in the forms of the three APIs, and their refusals."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from minisgl.core import ImageRefused, RequestError
from minisgl.message.messages import SourceImage, TokenizeChat
from minisgl.protocol.content import ImagePart, ImageUrl
from minisgl.protocol.requests import CHAT, MESSAGES, RESPONSES
from minisgl.request.convert import RequestConverter
from minisgl.request.images import source_image
from minisgl.settings import Limits
from tests.unit.server.fakes import CONFIG, FACTS

SEES = msgspec.structs.replace(FACTS, images=True)
URL = "data:image/png;base64,QUJD"
PART = {"type": "image_url", "image_url": {"url": URL}}
INPUT = {"type": "input_image", "image_url": URL}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
TOOL_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def read(route: str, given: Any, facts: Any = SEES, config: Any = CONFIG) -> TokenizeChat:
    body = {"model": "m", ("input" if route == RESPONSES else "messages"): given}
    if route == MESSAGES:
        body["max_tokens"] = 9
    request = RequestConverter(config).read(route, json.dumps(body).encode(), facts)
    ((_, prompt),) = request.prompts
    assert isinstance(prompt, TokenizeChat)
    return prompt


def image(path: str, low: bool = False) -> SourceImage:
    return SourceImage(data=b"QUJD", media_type="image/png", low=low, path=path)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def text(value: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": value}


def contents(prompt: TokenizeChat) -> list[Any]:
    return [message["content"] for message in json.loads(prompt.messages_json)]


SPLIT = [text("a"), {"type": "image"}, text("b")]


def test_chat_has_images_between_texts_and_in_results_of_tools() -> None:
    low = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    tool = {"role": "tool", "tool_call_id": "c", "content": [text("seen"), PART]}
    found = read(CHAT, [user(text("a"), low, text("b")), tool, user(text("x"), text("y"))])
    assert contents(found) == [SPLIT, [text("seen"), {"type": "image"}], "x\ny"]
    assert found.images == (
        image("messages[0].content[1]", low=True),
        image("messages[1].content[1]"),
    )


def test_responses_have_images_in_messages_and_in_outputs() -> None:
    said = [text("a", "input_text"), {**INPUT, "detail": "low"}, text("b", "input_text")]
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT]}
    found = read(RESPONSES, [{"role": "user", "content": said}, TOOL_CALL, output])
    assert contents(found) == [SPLIT, "", [{"type": "image"}]]
    assert found.images == (image("input[0].content[1]", low=True), image("input[2].output[0]"))


def test_messages_have_images_in_blocks_and_in_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("seen"), BLOCK]}
    turns = [
        user(text("a"), BLOCK, text("b")),
        {"role": "assistant", "content": [USE]},
        user(result, text("now")),
    ]
    found = read(MESSAGES, turns)
    assert contents(found) == [SPLIT, "", [text("seen"), {"type": "image"}], "now"]
    paths = ("messages[0].content[1]", "messages[2].content[0].content[1]")
    assert found.images == tuple(map(image, paths))


def of_url(url: str) -> list[Any]:
    return [user({"type": "image_url", "image_url": {"url": url}})]


def of_source(**source: str) -> list[Any]:
    return [user({"type": "image", "source": source})]


@pytest.mark.parametrize(
    ("route", "given", "reason"),
    [
        (CHAT, of_url("http://169.254.169.254/latest/meta-data"), "source"),
        (CHAT, of_url("HTTPS://example.com/a.png"), "source"),
        (CHAT, of_url("file:///etc/passwd"), "source"),
        (CHAT, of_url("/etc/passwd"), "source"),
        (CHAT, of_url(""), "source"),
        (CHAT, of_url("data:image/png,plain"), "broken"),
        (CHAT, of_url("data:image/png;base64,\u00e9"), "broken"),
        (RESPONSES, [user({"type": "input_image", "image_url": "https://a.b/c"})], "source"),
        (RESPONSES, [user({"type": "input_image", "file_id": "file-1"})], "source"),
        (MESSAGES, of_source(type="url", url="https://a.b/c.png"), "source"),
        (MESSAGES, of_source(type="file", file_id="file_1"), "source"),
    ],
)
def test_server_fetches_nothing(route: str, given: Any, reason: str) -> None:
    with pytest.raises(ImageRefused, match="data URL") as caught:
        read(route, given)
    place = "input[0].content[0]" if route == RESPONSES else "messages[0].content[0]"
    assert (caught.value.reason, caught.value.param) == (reason, place)


@pytest.mark.parametrize("beginning", ["data:", "https:", "data:image/png"])
@pytest.mark.parametrize("end", ["", ",", ";base64,QUJD"])
def test_url_of_20_mib_of_separators_is_not_divided(beginning: str, end: str) -> None:
    """Regression: the parts of such a URL took 0.6 s of the event loop, and 400 MB."""
    part = ImagePart(image_url=ImageUrl(url=beginning + ";" * (20 * 2**20) + end))
    tracemalloc.start()
    with pytest.raises(ImageRefused):
        source_image(part, "here")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000


@pytest.mark.parametrize(
    ("route", "part"),
    [
        (CHAT, {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg=="}}),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}),
        (RESPONSES, {"type": "input_file", "file_data": "QUJD"}),
        (MESSAGES, {"type": "document", "source": BLOCK["source"]}),
    ],
)
def test_other_files_are_refused_by_name(route: str, part: Any) -> None:
    with pytest.raises(RequestError, match=f"'{part['type']}'"):
        read(route, [user(part)])


@pytest.mark.parametrize(("route", "part"), [(CHAT, PART), (RESPONSES, INPUT), (MESSAGES, BLOCK)])
def test_model_without_images_refuses_one(route: str, part: Any) -> None:
    with pytest.raises(ImageRefused, match="computes no images") as caught:
        read(route, [user(part)], FACTS)
    assert caught.value.reason == "model"


def test_ninth_image_is_refused() -> None:
    assert len(read(CHAT, [user(*[PART] * 4), user(*[PART] * 4)]).images) == 8
    with pytest.raises(ImageRefused, match="has 9 images; at most 8") as caught:
        read(CHAT, [user(*[PART] * 4), user(*[PART] * 5)])
    error = caught.value
    assert (error.param, error.limit) == ("messages[1].content[4]", "max_images")
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_images=9))
    assert len(read(CHAT, [user(*[PART] * 9)], config=config).images) == 9


def test_image_cannot_be_continued() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "assistant", "content": [text("a"), PART]}],
        "continue_final_message": True,
    }
    with pytest.raises(RequestError, match="continue_final_message"):
        RequestConverter(CONFIG).read(CHAT, json.dumps(body).encode(), SEES)
