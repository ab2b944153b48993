"""`python -m bench images --encoder` on the CPU with a tiny model."""

import json
from pathlib import Path

import pytest

from bench.images import main
from minisgl.core import ConfigError
from tests.parity.image_models import save
from tests.process.tiny_model import build_tiny_model


def test_the_table_has_the_time_of_the_encoder_and_its_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = save("qwen3-vl", tmp_path)
    assert main(["--encoder", "--model", model, "--side", "32", "64"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["encoder, 32", "encoder, 64"]
    ratios = [row["ms"] / row["floor_ms"] for row in rows]
    assert [row["ratio"] for row in rows] == pytest.approx(ratios)
    assert rows[0]["floor_ms"] <= rows[1]["floor_ms"]


def test_the_encoder_refuses_other_sides_models_and_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = save("qwen3-vl", tmp_path)
    with pytest.raises(ConfigError, match="--side 40 must be a multiple of 32"):
        main(["--encoder", "--model", model, "--side", "40"])
    with pytest.raises(ConfigError, match="has no image encoder"):
        main(["--encoder", "--model", str(build_tiny_model(tmp_path / "tiny"))])
    with pytest.raises(SystemExit):
        main(["--encoder", "--model", model, "--tp", "2"])
    assert "unknown flags: --tp 2" in capsys.readouterr().err
