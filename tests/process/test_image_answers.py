"""A chat with an image over HTTP has the answer of transformers."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from PIL import Image

from tests.parity.image_models import MEAN, MODELS, STD, picture, processed
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_seeing_model

pytestmark = pytest.mark.process
PIXELS = picture(16, 20)  # no model of this family resizes so many pixels
TOKENS = 8


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model with an image encoder, and its folder with a tokenizer."""
    seeing = build_seeing_model(tmp_path_factory.mktemp("seeing") / "tiny", tiny_model)
    given, folder = json.loads((seeing / "config.json").read_text()), seeing.parent / "model"
    config = MODELS["qwen3_5"]()
    config.image_token_id = given["image_token_id"]
    config.text_config.vocab_size = given["image_token_id"] + 2
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes((seeing / name).read_bytes())
    processing = {"image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return made, folder


@pytest.fixture(scope="module")
def server(model: tuple[Any, Path]) -> Iterator[ServerProcess]:
    with run_server("--model", str(model[1])) as found:
        yield found.wait_ready()


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": "model", **body}, timeout=patience())
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> list[int]:
    """Return the tokens of greedy decoding after a prompt with the picture, without a cache."""
    given, tokens = processed([PIXELS]), list(ids)
    for _ in range(TOKENS):
        row = torch.tensor([tokens])
        kinds = (row == model.config.image_token_id).int()
        logits = model(input_ids=row, mm_token_type_ids=kinds, **given).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(ids) :]


def asked_about(pixels: torch.Tensor, question: str) -> list[dict[str, Any]]:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": question}, image]}]


def test_answer_is_that_of_transformers(server: ServerProcess, model: tuple[Any, Path]) -> None:
    said = asked_about(PIXELS, "name this picture")
    asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = post(server, "/v1/chat/completions", messages=said, **asked)
    wanted = greedy(model[0], post(server, "/tokenize", messages=said)["tokens"])
    text = post(server, "/detokenize", tokens=wanted)["prompt"]
    assert answer["choices"][0]["message"]["content"] == text


def test_image_of_two_questions_is_encoded_once(server: ServerProcess) -> None:
    before = server.metrics()
    for question in ("name this picture", "and this one"):
        said = asked_about(PIXELS.flip(0), question)
        post(server, "/v1/chat/completions", messages=said, max_tokens=1)
    after = server.metrics()
    names = "images_encoded_total", "images_reused_total", "image_buffer_tokens{state=used}"
    assert [after[name] - before[name] for name in names] == [1, 1, 80]
