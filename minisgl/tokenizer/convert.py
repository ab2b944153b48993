"""Converts the tokenizer of a model folder without tokenizer.json, in a process of its own.

The readers of transformers load slowly and may import torch, so neither the API server nor a
tokenizer worker loads them. The process writes tokenizer.json, its settings and the chat template
to a cache folder, and all processes read these files:

    HF_HOME/minisgl/tokenizers/HASH    HASH covers the files of the tokenizer and the libraries
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minisgl.core import ConfigError

# Vocabularies that transformers reads: SentencePiece, Mistral's tekken, tiktoken, byte-level BPE.
_VOCABULARIES = ("tokenizer.model", "tekken.json", "tokenizer.tiktoken", "vocab.json")
_SETTINGS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_LIBRARIES = ("transformers", "tokenizers")


def tokenizer_folder(folder: str | Path) -> Path:
    """Return the folder with tokenizer.json and its settings: `folder`, or that of its conversion.

    Converts the tokenizer if `folder` has no tokenizer.json and no earlier process has converted
    it. That takes some seconds. Raises ConfigError if the folder has no tokenizer, or if
    transformers cannot read it.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return folder
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        names = ", ".join(_VOCABULARIES)
        raise ConfigError(f"{folder} has no tokenizer; expected tokenizer.json or one of {names}")
    from huggingface_hub.constants import HF_HOME  # slow to import, not always needed

    target = Path(HF_HOME) / "minisgl" / "tokenizers" / _hash(folder)
    if not (target / "tokenizer.json").is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _convert(folder, target)
        except OSError as error:
            raise ConfigError(
                f"the tokenizer of {folder} cannot be converted in {target.parent}: {error}; set "
                "HF_HOME to a folder that this user may write"
            ) from error
    return target


def _hash(folder: Path) -> str:
    """Return a hash of the files of the tokenizer and of the versions of the libraries."""
    from importlib import metadata  # slow to import, not always needed

    digest = hashlib.sha256()
    for library in _LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}\n".encode())
    for name in ("config.json", *_VOCABULARIES, *_SETTINGS, *_TEMPLATES):
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _convert(folder: Path, target: Path) -> None:
    """Run the conversion, and move its complete result to `target`."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory(dir=target.parent) as parent:
        result = Path(parent) / "tokenizer"
        command = [sys.executable, "-m", "minisgl.tokenizer.convert", str(folder), str(result)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            lines = run.stderr.strip().splitlines()
            raise ConfigError(
                f"{folder} has no tokenizer.json, and transformers cannot convert its tokenizer: "
                f"{lines[-1] if lines else 'no reason given'}; `pip install minisgl[tokenizers]` "
                "installs the libraries that read other formats"
            )
        try:
            result.rename(target)
        except OSError:  # Another process has finished the same conversion.
            if not (target / "tokenizer.json").is_file():
                raise


def main(folder: str, result: str) -> None:
    """Read the tokenizer in `folder` with transformers, and write it to the new folder `result`."""
    from transformers import AutoTokenizer
    from transformers.integrations.mistral import convert_tekken_tokenizer

    tekken = Path(folder) / "tekken.json"
    if tekken.is_file() and not (Path(folder) / "tokenizer.model").is_file():
        tokenizer = convert_tekken_tokenizer(str(tekken))
    else:
        # Without the argument, transformers asks standard input whether to run code of the folder.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise SystemExit(f"transformers has no fast form of {type(tokenizer).__name__}")
    tokenizer.save_pretrained(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
