"""The images of a chat in the ids of its prompt."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl.images import ImageDecoder, ImageSpec, pad_ids
from minisgl.message.messages import SourceImage, TokenizeChat, TokenizeResult, TokenizeText
from minisgl.tokenizer import worker
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.worker import ImageThread, run_tokenizer, tokenize
from tests.patience import patience
from tests.unit.tokenizer.conftest import byte_level

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "data" / "templates" / "Qwen3.5-4B.jinja"
TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[TextTokenizer]:
    with closing(TextTokenizer(folder)) as plain:
        (token,) = plain.encode_text("<|image_pad|>")
    with closing(TextTokenizer(folder, images=spec_of(token))) as found:
        yield found


def spec_of(token: int, **changes: Any) -> ImageSpec:
    sizes = {"patch": 16, "merge": 2, "min_pixels": 1024, "max_pixels": 2**20}
    values = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "image_token": token}
    return ImageSpec(**sizes | values | changes)


@pytest.fixture(scope="module")
def decoder(tokenizer: TextTokenizer) -> Iterator[ImageDecoder]:
    spec = spec_of(tokenizer.encode_text("<|image_pad|>")[0])
    limits = {"max_pixels": 2**20, "max_tokens": 64, "max_request_pixels": 10_000}
    with closing(ImageDecoder(spec, **limits, timeout_s=60.0)) as found:
        yield found


def source(color: str, size: tuple[int, int], path: str = "here", cut: int = 0) -> SourceImage:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()[: len(buffer.getvalue()) - cut])
    return SourceImage(data=data, media_type="image/png", path=path)


def ids_of(packed: bytes) -> list[int]:
    return memoryview(packed).cast("i").tolist()


@pytest.fixture
def answer(tokenizer: TextTokenizer, decoder: ImageDecoder) -> Any:
    def ask(chat: list[dict[str, Any]], *images: SourceImage) -> TokenizeResult:
        message = TokenizeChat(uid=1, messages_json=json.dumps(chat).encode(), images=images)
        return tokenize(tokenizer, message, decoder)

    return ask


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_each_image_has_its_pads_in_its_place(answer: Any, tokenizer: TextTokenizer) -> None:
    """Images of a user and of a tool, between texts."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [
        {"role": "user", "content": [text("one"), IMAGE, text("two"), IMAGE]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [text("seen"), IMAGE]},
    ]
    sizes = [(64, 32), (32, 32), (96, 64)]
    images = [
        source(color, size) for color, size in zip(["red", "blue", "lime"], sizes, strict=True)
    ]
    found = answer(chat, *images)
    assert found.error is None
    ids, padded = ids_of(found.token_ids), ids_of(found.padded)
    assert [image.grid for image in found.images] == [(2, 4), (2, 2), (4, 6)]
    placed: list[int] = []
    for image in found.images:
        count = image.grid[0] * image.grid[1] // 4
        places = range(image.start, image.start + count)
        assert [padded[place] for place in places] == pad_ids(image.digest, image.grid, count)
        placed += places
    pad = tokenizer.encode_text("<|image_pad|>")[0]
    assert [place for place, token in enumerate(ids) if token == pad] == placed
    assert all(ids[i] == padded[i] for i in range(len(ids)) if i not in placed)
    once = tokenizer.encode_chat(chat, {"tools": None})
    assert [token for i, token in enumerate(ids) if token != pad or i - 1 not in placed] == once


def test_equal_images_have_equal_pads_and_one_pixel_changes_all(answer: Any) -> None:
    chat = [{"role": "user", "content": [IMAGE, IMAGE]}]
    padded = ids_of(answer(chat, source("red", (64, 64)), source("red", (64, 64))).padded)
    first = [token for token in padded if token < 0]
    assert first[:4] == first[4:]
    other = ids_of(answer(chat, source("red", (64, 64)), source("#fe0000", (64, 64))).padded)
    second = [token for token in other if token < 0]
    assert second[:4] == first[:4]
    assert not {*second[4:]} & {*first}


def test_pad_in_a_text_is_no_image(answer: Any, tokenizer: TextTokenizer) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    pad = tokenizer.encode_text("<|image_pad|>")[0]
    found = answer([{"role": "user", "content": typed}])
    assert pad not in ids_of(found.token_ids)
    found = answer([{"role": "user", "content": [text(typed), IMAGE]}], source("red", (32, 32)))
    assert ids_of(found.token_ids).count(pad) == len(found.images) == 1


def test_refused_image_has_its_place_and_the_reason(answer: Any) -> None:
    chat = [{"role": "user", "content": [IMAGE, IMAGE]}]
    good = source("red", (32, 32))
    found = answer(chat, good, source("red", (32, 32), "messages[0].content[1]", cut=30))
    assert found.error.startswith("messages[0].content[1]: the image cannot be decoded")
    assert (found.param, found.refused) == ("messages[0].content[1]", "broken")
    found = answer(chat, good, source("red", (2048, 1024), "second"))
    assert found.error.startswith("second: the image has 2048 x 1024 pixels; at most 1048576")
    assert (found.refused, found.limit) == ("size", "max_image_pixels")


def test_images_of_a_chat_share_its_pixels(answer: Any) -> None:
    chat = [{"role": "user", "content": [IMAGE] * 3}]
    images = [source("red", (64, 64), f"image {number}") for number in range(3)]
    found = answer(chat, *images)
    assert found.error.startswith("image 2: the image and those before it have 12288 pixels")
    assert (found.param, found.limit) == ("image 2", "max_request_pixels")


def test_template_that_leaves_out_an_image_refuses_the_chat(answer: Any) -> None:
    found = answer([{"role": "user", "content": "text"}], source("red", (32, 32)))
    assert "renders 0 of the 1 images" in found.error
    found = answer([{"role": "system", "content": [IMAGE]}], source("red", (32, 32)))
    assert "System message cannot contain images" in found.error


def test_texts_do_not_wait_for_the_images_of_a_chat(
    tokenizer: TextTokenizer, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a process tokenized nothing while it waited for the process for images."""
    decode, may_decode = decoder.decode, Event()

    def delayed(*arguments: Any) -> Any:
        assert may_decode.wait(patience(60))
        return decode(*arguments)

    monkeypatch.setattr(decoder, "decode", delayed)
    sent: SimpleQueue[TokenizeResult] = SimpleQueue()
    thread = ImageThread(tokenizer, decoder, sent.put, pytest.fail)
    content = [text("one"), IMAGE]
    chat = TokenizeChat(
        uid=1,
        messages_json=json.dumps([{"role": "user", "content": content}]).encode(),
        images=(source("red", (64, 64)),),
    )
    assert thread.handle(chat) is None
    broken = thread.handle(msgspec.structs.replace(chat, uid=2, messages_json=b"[]"))
    assert broken is not None
    assert broken.error
    found = thread.handle(TokenizeText(uid=3, text="two", add_special=False))
    assert found is not None
    assert ids_of(found.token_ids) == tokenizer.encode_text("two", False)
    assert sent.empty()
    may_decode.set()
    assert sent.get(timeout=patience(60)) == msgspec.structs.replace(
        tokenize(tokenizer, chat, decoder), decode_s=ANY
    )


def test_a_tokenizer_process_with_images_sends_their_chats_or_ends(
    folder: Path,
    tokenizer: TextTokenizer,
    decoder: ImageDecoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: an error in the thread of the images left a process that answered no such chat
    any more. The thread is the one that `run_tokenizer` starts."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    token = tokenizer.encode_text("<|image_pad|>")[0]
    config = {"image_token_id": token, "vision_config": {}}
    config["architectures"] = ["Qwen3VLForConditionalGeneration"]
    (path / "config.json").write_text(json.dumps(config))
    handles: list[Any] = []
    sent: SimpleQueue[TokenizeResult] = SimpleQueue()
    failures: SimpleQueue[Exception] = SimpleQueue()

    def send(message: TokenizeResult) -> None:
        sent.put(message)
        if message.uid == 2:
            raise OSError("closed")

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(worker, "Sender", lambda address: SimpleNamespace(send=send))
    monkeypatch.setattr(worker, "_serve_queue", lambda *given: handles.append(given[-1]))
    options = (0.5, False, lambda spec: decoder, lambda found: "none", lambda: None)
    run_tokenizer("tokenizer-0", str(path), str(tmp_path), *options, failures.put)  # type: ignore[misc]
    chat = TokenizeChat(
        uid=1,
        messages_json=json.dumps([{"role": "user", "content": [IMAGE]}]).encode(),
        images=(source("red", (64, 64)),),
    )
    for uid in (1, 2):
        assert handles[0](msgspec.structs.replace(chat, uid=uid)) is None
        found = sent.get(timeout=patience(60))
        assert (found.uid, len(found.images), found.error) == (uid, 1, None)
    assert str(failures.get(timeout=patience(60))) == "closed"


def test_prefix_of_the_next_turn_ends_behind_the_pads(
    answer: Any, tokenizer: TextTokenizer
) -> None:
    chat = [{"role": "user", "content": [IMAGE, text("one")]}]
    stable, _ = answer(chat, source("red", (64, 64))).prefixes
    plain, _ = tokenizer.prefixes.find(tokenizer.encode_chat(chat), chat, {})
    assert stable == plain + 3 > 3, "four pads stand for one image token"


GEMMA_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% for p in m.content %}"
    "{{ '<start_of_image>' if p.type == 'image' else p.text | trim }}{% endfor %}"
    "<end_of_turn>\n{% endfor %}"
)


def test_an_image_of_gemma_3_has_the_sequence_of_its_processor(tmp_path: Path) -> None:
    """Line breaks around an image become tokens together with those of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "ĊĊ", "ĊĊĊ", "ĊĊĊĊ"])}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊĊ", "Ċ")]
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    library.decoder = decoders.ByteLevel()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    begin, end, soft = tokens = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    library.add_special_tokens([*tokens, "<start_of_turn>", "<end_of_turn>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(GEMMA_TEMPLATE)
    ids = [library.token_to_id(token) for token in tokens]
    changes = {"patch": 4, "around": (ids[0], ids[1]), "side": 16}
    spec = spec_of(ids[2], min_pixels=256, **changes | {"max_pixels": 256})
    limits = {"max_pixels": 2**20, "max_tokens": 64, "max_request_pixels": 10_000}
    typed = f"a{begin}{soft}{end}"
    chat = [{"role": "user", "content": [IMAGE, text("b"), IMAGE, text(typed)]}]
    images = source("red", (40, 30)), source("blue", (16, 16))
    message = TokenizeChat(uid=1, messages_json=json.dumps(chat).encode(), images=images)
    sequence = f"\n\n{begin}{soft * 4}{end}\n\n"  # an image of 16 x 16 pixels has 4 tokens
    wanted = f"<start_of_turn>user\n{sequence}b{sequence}"
    for escapes in (False, True):
        tokenizer = TextTokenizer(tmp_path, escape_special_tokens=escapes, images=spec)
        with closing(tokenizer), closing(ImageDecoder(spec, **limits, timeout_s=60.0)) as decoder:
            found = tokenize(tokenizer, message, decoder)
        assert found.error is None
        got, known = ids_of(found.token_ids), library.encode(wanted).ids
        assert got[: len(known)] == known
        assert not {*ids} & {*got[len(known) :]}, "a text became an image"
        first, second = found.images
        assert (first.grid, second.grid) == ((4, 4), (4, 4))
        padded = ids_of(found.padded)
        assert padded[first.start : first.start + 4] == pad_ids(first.digest, (4, 4), 4)
        assert got[second.start : second.start + 5] == [ids[2]] * 4 + [ids[1]]
