"""Code edits: the recorded edits are read, and drafts find the unchanged parts of the files."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import drafts
from bench.edits import EDITS, edits_of, pages_for
from minisgl.core import ConfigError, EngineConfig
from minisgl.drafts import PricedLengths
from tests.parity.hybrid_models import Heads, save
from tests.parity.models import build_model

OLD = [f"def function_{i}(a, b):\n    return a + b + {i}\n" for i in range(5)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two edits of short files: one changes a line, one removes the last function."""
    path = tmp_path / "edits.jsonl"
    other = [text.replace("function", "method") for text in OLD]
    edits = [
        {"old": "".join(OLD), "changes": [[0, 0, "# c\n"], [3, 4, "    return a + b - 1\n"]]},
        {"old": "".join(other), "changes": [[8, 10, ""]]},
    ]
    lines = [json.dumps({"commit": "c", "path": "p", **edit}) for edit in edits]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(drafts, "EDITS", path)
    monkeypatch.setattr("bench.edits.FIRST_TOKENS", 8)
    return path


def test_edits_are_changes_of_the_old_file(source: Path) -> None:
    changed, cut = edits_of(source, 2, vocab_size=1000)
    assert changed.prediction.tolist() == changed.prompt.tolist()
    assert len(changed.output) == len(changed.prompt) + 3  # the comment
    assert (changed.output[3:] != changed.prompt).sum() == 1
    assert cut.output.tolist() == cut.prompt[: len(cut.output)].tolist()
    assert len(cut.output) < len(cut.prompt)
    (short,) = edits_of(source, 1, vocab_size=1000, whole_prompts=False)
    assert short.prompt.tolist() == changed.prompt[:8].tolist()
    assert short.prediction.tolist() == changed.prediction.tolist()


def test_recorded_edits_are_of_many_files() -> None:
    edits = edits_of(EDITS, 100, vocab_size=150_000)
    assert len(edits) == 20
    assert len({edit.prompt.tobytes() for edit in edits}) == 20
    for edit in edits:
        assert 1000 < len(edit.prompt) < 4000
        assert 1000 < len(edit.output) < 4000
        assert edit.prompt.tolist() != edit.output.tolist()
    raw = [json.loads(line) for line in EDITS.read_text().splitlines()]
    assert all(150 <= len(edit["old"].splitlines()) <= 400 for edit in raw)
    assert EDITS.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("family", "flags"), [("qwen3", []), ("gemma2", ["--short-prompts"])], ids=["whole", "short"]
)
def test_most_tokens_of_an_edit_are_accepted_drafts(
    family: str,
    flags: list[str],
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps forward the longest drafts at any price, because step times on a CPU are not steady.

    Progress appears because stderr is a terminal.
    """
    monkeypatch.setattr(PricedLengths, "best", lambda _, step: min(7, step.limit))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = build_model(family, tmp_path)
    flags = ["--model", model, "--edits", "2", "--device", "cpu", *flags]
    assert drafts.main([*flags, "--concurrency", "1", "2"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    for label in ("none", "ngram"):
        assert f"{label}: loading {model}\n" in shown.err
        assert f"{label}, 2 at once: 100%" in shown.err
    assert found["accepted"] > 0.5 * found["drafted"] > 0
    assert found["predicted"] > 0.4 * found["tokens"]
    assert {name: len(rates) for name, rates in found["rates"].items()} == {"none": 2, "ngram": 2}


def test_the_pool_on_a_cpu_has_room_for_all_requests_at_once(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the default of 512 MiB was too small for one edit with qwen3-0.6b."""
    edits = edits_of(source, 2, vocab_size=1000)
    lengths = sorted(len(edit.prompt) + len(edit.output) for edit in edits)
    assert pages_for(edits, 1, page_size=1) == lengths[-1]
    assert pages_for(edits, 16, page_size=1) == sum(lengths)
    small_pool = partial(EngineConfig, cpu_kv_bytes=2**14)
    monkeypatch.setattr(drafts, "EngineConfig", small_pool)
    flags = ["--model", build_model("qwen3", tmp_path), "--edits", "2", "--device", "cpu"]
    assert drafts.main([*flags, "--concurrency", "2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] > 0


def test_a_refused_edit_gives_an_error_and_no_speed(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the tokens of refused requests counted, and the speed was 56 million tokens/s."""

    def one_page(**settings: Any) -> EngineConfig:
        return EngineConfig(**(settings | {"num_pages": 1}))

    monkeypatch.setattr(drafts, "EngineConfig", one_page)
    flags = ["--model", build_model("qwen3", tmp_path), "--edits", "2", "--device", "cpu"]
    expected = r"cannot run the workload: \d+ prompt tokens .* exceed the 16 tokens"
    with pytest.raises(ConfigError, match=expected):
        drafts.main([*flags, "--concurrency", "1"])
    assert "tokens/s" not in capsys.readouterr().out


def test_pinned_rows_accept_the_given_number_of_tokens(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first and the last steps of an answer add a few tokens without drafts."""
    model = Heads(*save("qwen3_5", tmp_path)).path
    flags = ["--model", model, "--edits", "2", "--device", "cpu", "--concurrency", "2"]
    assert drafts.main([*flags, "--acceptance", "1:1.9,3:2.5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" at once")[0] for line in shown[:3]] == [
        "none, 2",
        "mtp 1, pinned 1.90, 2",
        "mtp 3, pinned 2.50, 2",
    ]
    found = json.loads(shown[-1])  # the counts are those of the last row
    assert 1 + 3 * found["accepted"] / found["drafted"] == pytest.approx(2.5, abs=0.15)


def test_random_prompts_have_the_given_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Heads(*save("qwen3_5", tmp_path)).path
    flags = ["--model", model, "--edits", "3", "--device", "cpu", "--concurrency", "2"]
    assert drafts.main([*flags, "--lengths", "40", "24", "--acceptance", "3:4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == 3 * 24
    plain, pinned = found["rates"].values()
    assert found["accepted"] > 0.9 * found["drafted"] > 0  # the last steps of an answer end early
    for (speed,) in (plain, pinned):
        assert speed["tokens_per_s"] > 0
        assert speed["token_s"] > 0


@pytest.mark.parametrize("text", ["2:1.5", "7:3", "1:2.5", "3", "3:0.5"])
def test_acceptance_that_cannot_be_pinned_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        drafts.main(["--acceptance", text])
    assert "--acceptance" in capsys.readouterr().err
