"""The divergence of a quantised model from the model itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.divergence import compare, distributions, main
from minisgl.core import ConfigError
from tests.parity.driver import make_engine
from tests.parity.models import VOCAB_SIZE, build_model, transformers_logits


def measure(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    assert main(["--device", "cpu", *flags]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_distribution_is_that_of_transformers(tmp_path: Path) -> None:
    path = build_model("qwen3", tmp_path)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 37).tolist()
    found = distributions(make_engine(path, page_size=16), ids, VOCAB_SIZE)
    expected = transformers_logits(path, ids).log_softmax(-1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_comparison_of_two_distributions() -> None:
    plain = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]], dtype=np.float32))
    changed = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], dtype=np.float32))
    found = compare(plain, changed, [0, 1])
    np.testing.assert_allclose(found.kl, [0.25 * np.log(2), 0], atol=1e-7)
    assert found.same.tolist() == [False, True]
    np.testing.assert_allclose(found.nll, [[np.log(4)], [np.log(2)]], rtol=1e-6)


def test_the_demo_model_hardly_changes_with_an_fp8_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--texts", "6", "--tokens", "96")
    assert measure(capsys, *flags)["kl_max"] == 0
    found = measure(capsys, *flags, "--kv-cache-dtype", "fp8")
    assert found["positions"] > 300
    assert 0 < found["kl_mean"] < 2e-3
    assert found["top1_agreement"] > 0.97
    assert found["nll"] == pytest.approx(found["nll_changed"], abs=0.05)


def test_a_file_is_cut_into_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Spell the word lantern. " * 40)
    found = measure(capsys, "--text", str(text), "--tokens", "50", "--texts", "3")
    assert (found["texts"], found["positions"]) == (3, 150)
    text.write_text("")
    with pytest.raises(ConfigError, match="there is no text"):
        measure(capsys, "--text", str(text))
