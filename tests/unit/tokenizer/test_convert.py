"""Folders without tokenizer.json: the conversion by transformers, its cache and its errors."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from transformers import AutoTokenizer

from minisgl.core import ConfigError
from minisgl.tokenizer import convert
from minisgl.tokenizer.convert import tokenizer_folder
from minisgl.tokenizer.tokenizer import TextTokenizer
from tests.forks import run_forked
from tests.patience import patience
from tests.unit.tokenizer.conftest import byte_level

TEXTS = ["hello", "  two  spaces\n\ttab", "é 你好 🙂", "<eos>inside", ""]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of huggingface_hub, empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of huggingface_hub for all tests that convert the same files."""
    path = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HOME", str(path))
        yield path


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conversions run in forks. The first test of this file starts one as a user does."""

    def run(command: list[str], env: dict[str, str], **_: bool) -> object:
        return run_forked(command[2:], patience(), env)

    monkeypatch.setattr(convert, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level BPE in the two files of GPT-2."""
    described = json.loads(byte_level().to_str())["model"]
    model = tokenizers.models.BPE(described["vocab"], [tuple(pair) for pair in described["merges"]])
    folder = tmp_path / "model"
    folder.mkdir()
    model.save(str(folder))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def test_two_files_of_bpe_give_the_ids_of_transformers(shared_hub: Path, folder: Path) -> None:
    found, expected = TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = found.encode_text(text)
        assert ids == expected(text).input_ids
        assert found.vocabulary.decode(ids, skip_special=False) == text
    assert not (folder / "tokenizer.json").exists()


def test_a_conversion_is_kept_until_a_file_changes(
    shared_hub: Path, folder: Path, in_forks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asks for the second conversion does not load torch."""
    converted = tokenizer_folder(folder)
    assert converted.parent == shared_hub / "minisgl" / "tokenizers"
    assert [path.name for path in converted.parent.iterdir()] == [converted.name], "no leftovers"
    with monkeypatch.context() as patched:
        patched.setattr(convert, "subprocess", None)
        assert tokenizer_folder(folder) == converted
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    program = (
        "import sys; from minisgl.tokenizer.tokenizer import TextTokenizer;"
        f"import huggingface_hub.constants as c; c.HF_HOME = {str(shared_hub)!r};"
        f"TextTokenizer({str(folder)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with monkeypatch.context() as patched:
        patched.setattr(convert, "subprocess", None)
        assert tokenizer_folder(folder) != converted
    assert TextTokenizer(folder).render_chat([]) == "[]"


def test_a_vocabulary_that_transformers_cannot_read_is_one_line(
    hub: Path, folder: Path, in_forks: None
) -> None:
    (folder / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot convert .*minisgl\[tokenizers\]") as caught:
        TextTokenizer(folder)
    assert "\n" not in str(caught.value)


def test_code_in_the_folder_does_not_run_if_the_user_types_yes(folder: Path, hub: Path) -> None:
    """transformers would ask standard input, with a question that the user does not see."""
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "odd"}))
    ran = folder / "ran"
    (folder / "odd.py").write_text(f"open({str(ran)!r}, 'w')\nclass Odd: ...\n")
    program = "from minisgl.tokenizer.tokenizer import TextTokenizer; "
    program += f"TextTokenizer({str(folder)!r})"
    environment = {**os.environ, "HF_HOME": str(hub)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input="y\n" * 9, text=True, capture_output=True, env=environment)
    assert "ConfigError" in done.stderr
    assert "trust_remote_code" in done.stderr
    assert not ran.exists()


def test_a_cache_that_cannot_be_written_is_named(folder: Path, hub: Path) -> None:
    hub.write_text("a file")
    with pytest.raises(ConfigError, match="set HF_HOME to a folder that this user may write"):
        TextTokenizer(folder)
