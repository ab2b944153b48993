"""The offline benchmark on a model with a small vocabulary and a short context."""

import json

import pytest

from minisgl.benchmark.offline import main
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError
from minisgl.demo import model_path

DEMO = ("--model", str(model_path()), "--device", "cpu", "--requests", "3", "--repeat", "1")


def test_prompt_ids_are_below_the_models_vocabulary_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: all prompts were refused, with ids up to 10,000 for a demo model of 1,280."""
    assert main([*DEMO, "--prompt-tokens", "4", "9", "--output-tokens", "2", "4"]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 12 <= totals["prompt_tokens"] <= 27
    assert totals["runs"][0]["tokens_per_s"] > 0


def test_the_result_names_the_dtypes_of_weights_and_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert main([*DEMO, *flags, "--prompt-tokens", "4", "9", "--output-tokens", "2", "4"]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (totals["quantization"], totals["kv_cache_dtype"]) == ("fp8", "fp8")


def test_a_workload_beyond_the_context_gives_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot run the workload: .* context length is 4096"):
        main([*DEMO, "--prompt-tokens", "8", "8", "--output-tokens", "4095", "4095"])


def test_the_default_workload_is_that_of_the_readme() -> None:
    """Its results are compared with those of other engines on the same workload."""
    workload = make_workload()
    assert (workload.prompt_lengths.sum(), sum(workload.max_tokens)) == (142_827, 133_966)
    assert max(map(max, workload.prompts)) == 10_000
