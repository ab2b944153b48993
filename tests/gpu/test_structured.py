"""A model with random weights answers 1,000 random grammars on the GPU.

Decode steps sample in CUDA graphs, with the masks applied between forward and sampler.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.core import FinishReason
from minisgl.distributed.comm import SingleCommunicator
from tests.gpu.test_answers import SMALL
from tests.unit.structured.grammars import (
    Run,
    check_answers,
    random_tasks,
    repeated_tasks,
    run_tasks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RUNS = {
    "free": Run(device="cuda", random=True, free=True, chunk=64),
    "crowded": Run(device="cuda", random=True, crowded=True, cache_type="naive"),
    "plain": Run(device="cuda", random=True, overlap=False, aborts=True),
    "edited": Run(device="cuda", random=True, params={"top_p": 0.95, "presence_penalty": 1.0}),
    "drafting": Run(device="cuda", random=True, drafts=True, free=True, chunk=64),
}
EXACT = {"dtype": "float32", "attention_backend": "torch"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = Path(write_model("qwen3-0.6b", tmp_path, full_vocabulary=True))
    config = json.loads((folder / "config.json").read_text())
    shape = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    (folder / "config.json").write_text(json.dumps(config | shape))
    return str(folder)


@pytest.mark.parametrize("name", RUNS)
def test_every_complete_answer_matches_its_grammar(name: str, path: str, tmp_path: Path) -> None:
    run, tasks = RUNS[name], random_tasks(250, seed=len(name))
    if run.drafts:
        tasks = [*tasks[:150], *repeated_tasks() * 33]
    outcome = run_tasks(SingleCommunicator(), str(tmp_path), path, run, tasks)
    complete = check_answers(path, run, tasks, outcome)
    constrained = len(tasks) * (2 if run.free else 3) // 3
    assert complete >= constrained * 0.7 - outcome.ends.count(FinishReason.ABORT)
    assert (outcome.totals.preemptions_total > 0) == run.crowded
    assert outcome.totals.constraints.forced_tokens > 0
    assert not outcome.totals.constraints.failures
    assert outcome.totals.phases["decode"].graph_steps > 0
    assert (sum(outcome.totals.drafts.accepted) > 0) == run.drafts


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_answer_in_float32(overlap: bool, path: str, tmp_path: Path) -> None:
    tasks = [*random_tasks(30, seed=8), *repeated_tasks() * 5]
    plain = Run(device="cuda", random=True, overlap=overlap, engine=EXACT)
    drafting = replace(plain, drafts=True)
    arguments = SingleCommunicator(), str(tmp_path), path
    expected = run_tasks(*arguments, plain, tasks)
    found = run_tasks(*arguments, drafting, tasks)
    assert found.tokens == expected.tokens
    assert found.ends == expected.ends
    assert sum(found.totals.drafts.accepted) > 0
