"""The offline benchmark on a model whose vocabulary and context are small."""

import json

import pytest

from minisgl.benchmark.offline import main
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError
from minisgl.demo import model_path

DEMO = ("--model", str(model_path()), "--device", "cpu", "--requests", "3", "--repeat", "1")


def test_prompts_are_of_the_models_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids up to 10,000, of which the demo model knows 1,280, were refused one by one."""
    assert main([*DEMO, "--prompt-tokens", "4", "9", "--output-tokens", "2", "4"]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 12 <= totals["prompt_tokens"] <= 27
    assert totals["runs"][0]["tokens_per_s"] > 0


def test_what_the_model_cannot_run_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot run the workload: .* exceed the 4096 tokens"):
        main([*DEMO, "--prompt-tokens", "4000", "4000", "--output-tokens", "200", "200"])


def test_the_readme_workload_stays_what_it_is() -> None:
    """Its figures are compared with those of others: 142,827 prompt, 133,966 output tokens."""
    workload = make_workload()
    lengths = workload.prompt_lengths().sum(), workload.output_lengths().sum()
    assert lengths == (142_827, 133_966)
    assert max(map(max, workload.prompts)) == 10_000
