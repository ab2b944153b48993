"""The workers of a run share the folder in which each model is built once."""

from pathlib import Path

import pytest

from tests.parity import models


def test_each_model_has_files_of_its_own_and_none_of_an_earlier_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the lock of a name with a dot was that of all names with the same beginning."""

    def build(family: str, path: Path, seed: int) -> None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(f"{family} {seed}")

    shared, own = tmp_path / "shared", tmp_path / "own"
    stale = shared / "qwen3.5-0.unfinished"
    stale.mkdir(parents=True)
    (stale / "part.safetensors").touch()
    monkeypatch.setenv(models.MODELS, str(shared))
    monkeypatch.setattr(models, "_build", build)
    for family in ("qwen3.5", "qwen3.6"):
        built = Path(models.build_model(family, own))
        assert [each.name for each in built.iterdir()] == ["config.json"]
        assert (built / "config.json").read_text() == f"{family} 0"
    locks = {each.name for each in shared.iterdir() if each.is_file()}
    assert locks == {"qwen3.5-0.lock", "qwen3.6-0.lock"}
