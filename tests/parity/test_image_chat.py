"""`LLM.chat` with images answers as transformers does, from the file to the tokens."""

import io
import json
import string
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from PIL import Image

from minisgl import LLM
from tests.parity.image_models import IMAGE, MEAN, MERGE, PATCH, STD, save

TOKENS = 6
SIZE = {"shortest_edge": 2**12, "longest_edge": 2**14}
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
)


def complete(folder: Path) -> None:
    """Add a tokenizer of letters, a template, and the sizes of images."""
    letters = {letter: index for index, letter in enumerate(string.ascii_letters)}
    others = {f"<{index}>": index for index in range(len(letters), IMAGE)}
    model = tokenizers.models.BPE({**letters, **others, "<|image_pad|>": IMAGE}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|image_pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"image_mean": MEAN, "image_std": STD, "size": SIZE}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, ids: list[int], image: Image.Image) -> list[int]:
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, image_mean=MEAN, image_std=STD, size=SIZE
    )
    given = processor([image], return_tensors="pt")
    count = int(given["image_grid_thw"][0].prod()) // MERGE**2
    place = ids.index(IMAGE)
    ids = [*ids[:place], *[IMAGE] * count, *ids[place + 1 :]]
    for _ in range(TOKENS):
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE).int()
        logits = model(input_ids=tokens, mm_token_type_ids=kinds, **given).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-TOKENS:]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3-vl"])
def test_chat_with_an_image_answers_as_transformers(name: str, tmp_path: Path) -> None:
    """A PNG file of 90 x 130 pixels, as bytes and as an image of PIL."""
    model, path = save(name, tmp_path)
    complete(Path(path))
    image = Image.effect_noise((90, 130), 80).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    text = [{"type": "text", "text": part} for part in ("look", "here")]
    expected = greedy(model, [*(11, 14, 14, 10), IMAGE, *(7, 4, 17, 4)], image)
    settings = {"num_pages": 64, "max_seq_len": 512, "image_cache_tokens": 256}
    with LLM(path, **settings) as llm:
        for given in (buffer.getvalue(), image):
            parts = [text[0], {"type": "image", "image": given}, text[1]]
            chat = [{"role": "user", "content": parts}]
            found = llm.chat(chat, temperature=0, max_tokens=TOKENS, ignore_eos=True)
            assert list(found.token_ids) == expected
