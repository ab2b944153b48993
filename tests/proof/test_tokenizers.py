"""Published tokenizers without tokenizer.json have the ids of transformers."""

import json
import shutil
import site
import subprocess
from pathlib import Path

import pytest

from tests.proof.venvs import make_venv

pytestmark = pytest.mark.proof

# SentencePiece models and tekken files of Mistral, which the package mistral-common carries.
FILES = {
    "tokenizer.model.v1": "tokenizer.model",
    "mistral_instruct_tokenizer_240323.model.v3": "tokenizer.model",
    "mistral_instruct_tokenizer_241114.model.v7": "tokenizer.model",
    "tekken_240911.json": "tekken.json",
}
SETTINGS = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


def test_mistral_vocabularies_have_the_ids_of_transformers(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    requirements = ["sentencepiece", "tiktoken", "protobuf", "mistral-common"]
    python = make_venv(tmp_path / "venv", *requirements) / "python"
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    inherited = [str(root), *site.getsitepackages()]
    (packages / "project.pth").write_text("\n".join(inherited))
    data = packages / "mistral_common" / "data"
    folders = []
    for source, name in FILES.items():
        folder = tmp_path / source
        folder.mkdir()
        shutil.copy(data / source, folder / name)
        (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
        if name == "tokenizer.model":
            (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
        folders.append(str(folder))
    script = root / "tests" / "proof" / "scripts" / "published_tokenizers.py"
    done = subprocess.run(
        [str(python), str(script), str(tmp_path / "hub"), *folders], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == len(FILES)
