"""Code edits: real edits are read, and drafts find the unchanged parts of the files."""

import json
import subprocess
from pathlib import Path

import pytest

from minisgl.benchmark import code_edits
from minisgl.core import ConfigError
from tests.parity.models import build_model

OLD = [f"def function_{i}(a, b):\n    return a + b + {i}\n" for i in range(6)]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two edits of one file, and a commit of another kind of file."""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)

    folder = tmp_path / "repository"
    folder.mkdir()
    git("init", "-q")
    for text in ("".join(OLD), "".join(OLD).replace("+ 3", "- 3"), "".join(OLD[:5])):
        (folder / "code.py").write_text(text)
        (folder / "notes.txt").write_text(text)
        git("add", ".")
        git("commit", "-qm", "an edit")
    monkeypatch.setattr(code_edits, "_FEWEST", 50)
    monkeypatch.setattr(code_edits, "_MOST", 240)
    return folder


def test_edits_are_the_newest_modifications_of_python_files(repository: Path) -> None:
    newest, older = code_edits.edits_of(repository, 2, vocab_size=1000)
    assert older.new.tolist() == newest.old.tolist()
    assert len(newest.new) < len(newest.old)
    assert (older.new != older.old).sum() == 1
    with pytest.raises(ConfigError, match="has 2 edits of Python files; 3 are needed"):
        code_edits.edits_of(repository, 3, vocab_size=1000)
    with pytest.raises(ConfigError, match="git cannot read"):
        code_edits.edits_of(repository.parent, 1, vocab_size=1000)


def test_most_tokens_of_an_edit_are_accepted_drafts(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model("qwen3", tmp_path)
    flags = ["--model", model, "--repository", str(repository), "--edits", "2", "--device", "cpu"]
    assert code_edits.main([*flags, "--concurrency", "1", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["accepted"] > 0.5 * found["drafted"] > 0
    assert {name: len(rates) for name, rates in found["rates"].items()} == {"none": 2, "ngram": 2}
