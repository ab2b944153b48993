"""`python -m bench structured` on the CPU with a tiny model."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from bench import structured
from bench.structured import main
from minisgl.core import ConfigError
from minisgl.llm import LLM
from tests.process.tiny_model import build_tiny_model


def test_the_table_compares_free_and_constrained_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model, schemas = build_tiny_model(tmp_path / "model"), tmp_path / "schemas"
    schemas.mkdir()
    (schemas / "good.json").write_text(json.dumps({"type": "object"}))
    (schemas / "refused.json").write_text(json.dumps({"$ref": "#"}))
    flags = ["--device", "cpu", "--streams", "2", "3", "--tokens", "40"]
    assert main(["--model", str(model), "--schema-folder", str(schemas), *flags]) == 0
    shown = capsys.readouterr()
    assert "600/600" in shown.err, "tokens of 3 runs with 2 and with 3 streams of 40 tokens"
    assert "2/2" in shown.err, "schemas"
    assert "80/80" in shown.err, "tokens of the runs with one stream"
    table = shown.out.splitlines()
    found = json.loads(table[-1])
    rows = {name: milliseconds for name, milliseconds, _ in found["rows"]}
    for name in ("2 streams, free", "3 streams, masks", "3 streams, masks and forced tokens"):
        assert rows[f"ITL p50, {name}"] > 0
    forced = next(name for name in rows if name.endswith("forced"))
    assert int(forced.split("%")[0].split()[-1]) > 0
    assert rows["check of a new schema, p50"] > 0
    assert "TTFT p50, free, 1 of 2 schemas" in rows, "the check refuses one schema"
    assert found["failures"] == {}
    assert len(table) == len(rows) + 3, "a title, a head, the rows and the JSON"


def test_a_refused_stream_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the ITL of refused streams was nan, and the benchmark went on."""
    monkeypatch.setattr(structured, "LLM", partial(LLM, num_pages=5))
    flags = ["--model", str(build_tiny_model(tmp_path)), "--device", "cpu", "--schemas", "1"]
    with pytest.raises(ConfigError, match="64 prompt tokens and 40 output tokens exceed the 80"):
        main([*flags, "--streams", "2", "--tokens", "40"])
