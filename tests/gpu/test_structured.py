"""A model with random weights answers 1,000 random grammars on the GPU.

Decode steps sample in CUDA graphs, with the masks applied between forward and sampler.
"""

import json
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.core import FinishReason
from minisgl.distributed.comm import SingleCommunicator
from tests.gpu.test_answers import SMALL
from tests.unit.structured.grammars import Run, check_answers, random_tasks, run_tasks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RUNS = {
    "free": Run(device="cuda", random=True, free=True, chunk=64),
    "crowded": Run(device="cuda", random=True, crowded=True, cache_type="naive"),
    "plain": Run(device="cuda", random=True, overlap=False, aborts=True),
    "edited": Run(device="cuda", random=True, params={"top_p": 0.95, "presence_penalty": 1.0}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_complete_answer_matches_its_grammar(name: str, tmp_path: Path) -> None:
    path = Path(write_model("qwen3-0.6b", tmp_path, full_vocabulary=True))
    config = json.loads((path / "config.json").read_text())
    shape = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    (path / "config.json").write_text(json.dumps(config | shape))
    run, tasks = RUNS[name], random_tasks(250, seed=len(name))
    outcome = run_tasks(SingleCommunicator(), str(tmp_path), str(path), run, tasks)
    complete = check_answers(str(path), run, tasks, outcome)
    constrained = len(tasks) * (2 if run.free else 3) // 3
    assert complete >= constrained * 0.7 - outcome.ends.count(FinishReason.ABORT)
    assert (outcome.totals.preemptions_total > 0) == run.crowded
    assert outcome.totals.constraints.forced_tokens > 0
    assert not outcome.totals.constraints.failures
    assert outcome.totals.phases["decode"].graph_steps > 0
