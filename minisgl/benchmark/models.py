"""Model folders for benchmarks with random weights: a config and a tokenizer, but no weights."""

import itertools
import json
import string
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import save_file

from minisgl.core import ConfigError


def _read_shapes() -> dict[str, dict[str, Any]]:
    """Return the config of each shape of shapes.toml, which explains the file."""
    text = Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")
    given = tomllib.loads(text)
    configs: dict[str, dict[str, Any]] = {}
    for name, own in (given["families"] | given["shapes"]).items():
        base = configs[own.pop("like")] if "like" in own else {}
        configs[name] = base | own
    shapes = {name: configs[name] for name in given["shapes"]}
    for shape in shapes.values():
        if kinds := shape.get("layer_types"):
            shape["layer_types"] = kinds * (shape["num_hidden_layers"] // len(kinds))
    return shapes


SHAPES: Mapping[str, dict[str, Any]] = _read_shapes()  # config.json by name
_IMAGE = "<|image_pad|>"
# Renders the texts and images of a chat, one after the other.
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '" + _IMAGE + "' if part.type == 'image' "
    "else part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def write_model(name: str, folder: Path, full_vocabulary: bool = False) -> str:
    """Write the files of the model `name` to `folder`, and return the folder.

    The folder gets a checkpoint without tensors, because the engine refuses a folder without one.
    full_vocabulary: True gives every id a text, so that a server sends an event for every token,
    except for 51 ids: each is the first byte of a longer character, which waits for the next token.
    False builds a tokenizer of single bytes. A model with images also gets the last id as the image
    token, and a chat template. Raises ConfigError for an unknown name.
    """
    if name not in SHAPES:
        raise ConfigError(f"benchmark model {name!r} is not known; known: {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({}, folder / "model.safetensors")
    vocab_size = config["vocab_size"]
    merges = list(itertools.islice(_merges(), vocab_size if full_vocabulary else 0))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    image_token = config.get("image_token_id")
    texts = [*alphabet, *(left + right for left, right in merges)][: image_token or vocab_size]
    vocab = {text: index for index, text in enumerate(texts)}
    merges = merges[: len(vocab) - len(alphabet)]
    if image_token is not None:
        vocab[_IMAGE] = image_token
        (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if image_token is not None:
        tokenizer.add_special_tokens([_IMAGE])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges that build words of two characters, of three and so on."""
    words = ["Ġ", *string.ascii_lowercase]
    while True:
        words = [pair[0] + pair[1] for pair in itertools.product(words, string.ascii_lowercase)]
        for word in words:
            yield word[:-1], word[-1]
