"""Schedules with drafts on the GPU, in graphs: no token changes except between equal logits.

float32 gives exactly the tokens of the CPU without drafts. bfloat16 is compared with the float32
logits of its own text, as in test_schedules. Replayed tokens make all drafts right.
"""

from collections import deque

import numpy as np
import pytest
import torch

from bench.drafts import Edit, ReplayTokens
from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.message.messages import AddReq
from minisgl.scheduler import LocalInbox, Scheduler
from tests.gpu import test_schedules as schedules
from tests.gpu.test_schedules import BF16, CASES, FP32, Case
from tests.parity.driver import with_drafts
from tests.unit.scheduler.drafts import ChangingDrafts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
folder, oracle = schedules.folder, schedules.oracle


@pytest.fixture(autouse=True)
def repeated_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts repeat themselves, so that n-grams have matches."""
    plain = schedules.prompts()
    repeated = [(prompt[:25] * 4)[: len(prompt)] for prompt in plain]
    monkeypatch.setattr(schedules, "prompts", lambda: repeated)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_differs_between_equal_logits_only(
    case: Case, folder: str, oracle: Engine
) -> None:
    drafts = ChangingDrafts(7)
    engine = schedules.gpu_engine(folder, oracle, case, BF16, drafts)
    found = schedules.run(engine, case, schedules.greedy, longest_cycles=200_000)
    prompts = schedules.prompts()
    for uid, output in found.outputs.items():
        assert len(output) == schedules.OUTPUT_TOKENS
        schedules.check_text(oracle, prompts[uid % len(prompts)], output)
    assert drafts.drafted > 0


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
@pytest.mark.parametrize("sampling", [schedules.greedy, schedules.drawn])
def test_float32_equals_the_cpu_without_drafts(
    case: Case, sampling: object, folder: str, oracle: Engine
) -> None:
    engine = schedules.gpu_engine(folder, oracle, case, FP32, ChangingDrafts(7))
    found = schedules.run(engine, case, sampling)  # type: ignore[arg-type]
    plain = schedules.make_cpu(folder, oracle)
    expected = schedules.run(plain, CASES[0], sampling)  # type: ignore[arg-type]
    assert found.outputs == expected.outputs


@pytest.mark.parametrize("source", ["prompt", "prediction"])
@pytest.mark.parametrize("reqs", [1, 5])
def test_graphs_accept_all_right_drafts(reqs: int, source: str, folder: str) -> None:
    replay(reqs, source, folder)


def replay(reqs: int, source: str, folder: str) -> None:
    """The replayed output repeats the prompt, or is the prediction: a step gives eight tokens."""
    config = EngineConfig(model_path=folder, dummy_weight=True, max_running_reqs=6, **BF16)
    drafts = ChangingDrafts(7, changing=False)
    rng = np.random.default_rng(0)
    texts = [rng.permutation(1000)[:160].astype(np.int32) + 3 for _ in range(reqs)]
    if source == "prompt":
        texts = [np.tile(text[:40], 4) for text in texts]
    cut = 80 if source == "prediction" else 160
    edits = [Edit(text[:80], text[80:], text[cut:]) for text in texts]
    extensions = ReplayTokens(edits).added_to(with_drafts(drafts))
    engine = Engine(config, SingleCommunicator(), extensions=extensions)
    inbox, outbox = LocalInbox(), deque()
    scheduler = Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None),
        vocab_size=schedules.VOCAB,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    for uid, edit in enumerate(edits):
        sampling = SamplingParams(max_tokens=80, ignore_eos=True)
        ids, prediction = edit.prompt.tobytes(), edit.prediction.tobytes()
        message = AddReq(uid=uid, token_ids=ids, sampling=sampling, prediction=prediction)
        inbox.messages.append(message)
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    for uid, edit in enumerate(edits):
        pairs = [pair for out in outbox for pair in zip(out.uids, out.token_ids, strict=True)]
        assert [token for owner, token in pairs if owner == uid] == edit.output.tolist()
    assert drafts.agreed == drafts.drafted
    assert scheduler.totals.phases["decode"].graph_steps <= 13
    # The prefill gives the first token. The next step finds nothing, because it knows this one.
    predicted = sum(count for out in outbox for _, count in out.predicted)
    assert predicted == (78 * reqs if source == "prediction" else 0)
