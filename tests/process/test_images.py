"""Images through the real processes of the front end, up to the scheduler."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.patience import patience
from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_seeing_model

pytestmark = pytest.mark.process
PADS = 64  # of an image that is resized to 256 x 256 pixels


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = build_seeing_model(tmp_path_factory.mktemp("seeing") / "tiny", tiny_model)
    flags = ["--max-image-pixels", str(2**20), "--max-images", "2", "--image-timeout", "30"]
    flags += ["--image-cache-tokens", "300"]
    with run_server("--model", str(folder), *flags, stub="echo") as found:
        yield found.wait_ready()


def encoded(size: tuple[int, int], kind: str = "PNG", **options: Any) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=patience())


def image_url(data: str, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


def test_image_of_each_api_reaches_the_scheduler(server: ServerProcess) -> None:
    """The stub of the scheduler answers with the ids of the prompt, without the pads."""
    data = encoded((256, 256))
    before = server.metrics()["images_total"]
    said = user({"type": "text", "text": "see"}, image_url(data))
    found = post(server, "/v1/chat/completions", messages=said, max_tokens=3).json()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = user({"type": "text", "text": "see"}, {"type": "image", "source": source})
    message = post(server, "/v1/messages", messages=blocks, max_tokens=3).json()
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    items = user({"type": "input_text", "text": "see"}, part)
    response = post(server, "/v1/responses", input=items, max_output_tokens=16).json()
    plain = post(server, "/tokenize", messages=user({"type": "text", "text": "see"})).json()
    size = plain["count"] + PADS + 2  # the tokens around an image
    assert found["usage"]["prompt_tokens"] == size
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == size
    assert response["usage"]["input_tokens"] == size
    assert server.metrics()["images_total"] == before + 3


def test_rendered_prompt_has_the_ids_of_the_cache(server: ServerProcess) -> None:
    """A router compares them with the blocks of KV events. /tokenize has ids of the vocabulary."""
    said = user(image_url(encoded((256, 256))))
    rendered = post(server, "/v1/chat/completions/render", messages=said).json()["token_ids"]
    ids = post(server, "/tokenize", messages=said).json()["tokens"]
    assert len(rendered) == len(ids)
    different = [(a, b) for a, b in zip(rendered, ids, strict=True) if a != b]
    assert len(different) == PADS
    assert all(pad < 0 <= token for pad, token in different)
    assert len({token for _, token in different}) == 1


def test_large_image_is_resized_to_a_third_of_the_image_buffer(server: ServerProcess) -> None:
    ids = post(server, "/tokenize", messages=user(image_url(encoded((960, 960))))).json()["tokens"]
    assert max(map(ids.count, ids)) == 300 // 3


@pytest.mark.parametrize(
    ("part", "reason", "limit"),
    [
        (image_url(encoded((1025, 1024))), "size", "max_image_pixels"),
        (image_url(encoded((201, 1))), "size", "max_image_aspect"),
        (image_url(encoded((256, 256))[:-40]), "broken", None),
        (image_url(encoded((256, 256)), "image/jpeg"), "format", None),
        (image_url("QUJD", "application/pdf"), "format", None),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, "source", None),
    ],
)
def test_refusal_is_a_400_with_its_place_and_is_counted(
    server: ServerProcess, part: Any, reason: str, limit: str | None
) -> None:
    before = server.metrics()
    answer = post(server, "/v1/chat/completions", messages=user(part))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "image_refused")
    assert error["param"] == "messages[0].content[0]"
    assert error["message"].startswith("messages[0].content[0]")
    names = [f"images_refused_total{{reason={reason}}}"]
    names += [f"limits_exceeded_total{{limit={limit}}}"] if limit else []
    after = server.metrics()
    assert [after[name] - before[name] for name in names] == [1] * len(names)


def test_third_image_is_refused(server: ServerProcess) -> None:
    answer = post(server, "/v1/chat/completions", messages=user(*[image_url(encoded((9, 9)))] * 3))
    assert answer.status_code == 400
    assert "has 3 images; at most 2" in answer.json()["error"]["message"]
