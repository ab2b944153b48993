"""Penalties, bias and log-probabilities equal a simple computation from the logits of transformers.

This holds with overlapped steps, chunked prefill, prefix-cache hits and preemption.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.message.messages import AddReq, StepOutput, TokenLogprobs
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.models import VOCAB_SIZE, transformers_greedy, transformers_logits
from tests.unit.scheduler.integrity import check_scheduler

ModelPath = Callable[[str], str]
TOKENS = 18
EOS = 2


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    stem = rng.integers(3, VOCAB_SIZE, 24).tolist()
    return [stem + rng.integers(3, VOCAB_SIZE, own).tolist() for own in (5, 9, 14)]


class Run:
    """All outputs of some requests, by uid."""

    def __init__(
        self, path: str, params: list[SamplingParams], crowded: bool = False, warm: bool = False
    ) -> None:
        engine = make_engine(path, num_pages=16 if crowded else 200)
        inbox, outbox = LocalInbox(), deque()
        self.scheduler = Scheduler(
            engine,
            SchedulerConfig(prefill_budget_tokens=16, target_step_ms=None),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            inbox=inbox,
            send=outbox.append,
        )
        if warm:  # every prompt is in the prefix cache before the requests arrive
            for uid, prompt in enumerate(prompts(), start=100):
                ids = np.array(prompt, dtype="<i4").tobytes()
                inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=greedy()))
            while inbox.messages or not self.scheduler.idle:
                self.scheduler.iterate()
            assert self.scheduler.memory.tree.evictable_pages > 0
            outbox.clear()
            self.scheduler.totals.cached_tokens_total = 0
        for uid, (prompt, one) in enumerate(zip(prompts(), params, strict=True)):
            ids = np.array(prompt, dtype="<i4").tobytes()
            inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=one))
        while inbox.messages or not self.scheduler.idle:
            self.scheduler.iterate()
            check_scheduler(self.scheduler)
        self.tokens: dict[int, list[int]] = {uid: [] for uid in range(len(params))}
        self.logprobs: dict[int, list[TokenLogprobs]] = {uid: [] for uid in self.tokens}
        self.prompt: dict[int, list[TokenLogprobs]] = {uid: [] for uid in self.tokens}
        for output in outbox:
            self._read(output)

    def _read(self, output: StepOutput) -> None:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            self.tokens[uid].append(token)
        for one in output.logprobs:
            self.logprobs[one.uid].append(one)
        for chunk in output.prompt_logprobs:
            self.prompt[chunk.uid].append(chunk)


def plain(path: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return greedy tokens with the edits in simple code.

    The repetition penalty is the implementation in transformers.
    """
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    ids = list(prompt)
    for step in range(TOKENS):
        logits = transformers_logits(path, ids)[-1].clone()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if step < params.min_tokens:
            logits[EOS] = -torch.inf
        logits = processors(torch.tensor([ids]), logits.unsqueeze(0))[0]
        counts = torch.bincount(
            torch.tensor(ids[len(prompt) :], dtype=torch.long), minlength=VOCAB_SIZE
        )
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS and not params.ignore_eos:
            break
    return ids[len(prompt) :]


def greedy(**changes: object) -> SamplingParams:
    base = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    return SamplingParams(**base | changes)  # type: ignore[arg-type]


EDITS = [
    pytest.param({"frequency_penalty": 1.5}, id="frequency"),
    pytest.param({"presence_penalty": -2.0}, id="presence"),
    pytest.param({"repetition_penalty": 1.7}, id="repetition"),
    pytest.param({"logit_bias": {7: 100.0}}, id="bias-forces"),
    pytest.param(
        {"frequency_penalty": 2.0, "repetition_penalty": 0.8, "logit_bias": {9: 4.0, 11: -100.0}},
        id="together",
    ),
    pytest.param(
        {"ignore_eos": False, "logit_bias": {EOS: 50.0}, "min_tokens": 6}, id="min-tokens"
    ),
]


@pytest.mark.parametrize("edits", EDITS)
def test_edited_logits(edits: dict[str, object], model_path: ModelPath) -> None:
    path = model_path("qwen3")
    params = [greedy(**edits), greedy(), greedy(**edits)]
    edited, beside, last = prompts()
    expected = [plain(path, edited, params[0]), transformers_greedy(path, beside, TOKENS)]
    expected.append(plain(path, last, params[2]))
    assert expected[0] != transformers_greedy(path, edited, TOKENS), "the edits must change tokens"
    for crowded in (False, True):
        run = Run(path, params, crowded)
        assert (run.scheduler.totals.preemptions_total > 0) == crowded
        assert run.scheduler.totals.overlapped_steps_total > 0
        assert [run.tokens[uid] for uid in range(3)] == expected


@pytest.mark.parametrize("crowded", [False, True], ids=["roomy", "preempted"])
def test_logprobs_of_tokens_and_prompt(crowded: bool, model_path: ModelPath) -> None:
    path = model_path("llama")
    params = [
        greedy(logprobs=3),
        greedy(logprobs=0, prompt_logprobs=2),
        greedy(prompt_logprobs=0),
    ]
    run = Run(path, params, crowded)
    for uid, (prompt, one) in enumerate(zip(prompts(), params, strict=True)):
        ids = prompt + run.tokens[uid]
        expected = transformers_logits(path, ids).log_softmax(-1)
        if one.logprobs is not None:
            assert len(run.logprobs[uid]) == TOKENS
            for step, found in enumerate(run.logprobs[uid]):
                at = expected[len(prompt) + step - 1]
                assert found.logprobs[0] == pytest.approx(
                    float(at[ids[len(prompt) + step]]), abs=1e-3
                )
                top = at.topk(one.logprobs)
                assert found.top_ids[0] == top.indices.tolist()
                assert found.top_logprobs[0] == pytest.approx(top.values.tolist(), abs=1e-3)
        chunks = run.prompt[uid]
        if one.prompt_logprobs is not None:
            values = [value for chunk in chunks for value in chunk.logprobs]
            positions = [c.position + i for c in chunks for i in range(len(c.logprobs))]
            assert positions == list(range(1, len(prompt))), "each prompt token but the first, once"
            wanted = [float(expected[p - 1, ids[p]]) for p in positions]
            assert values == pytest.approx(wanted, abs=1e-3)
            tops = [ids for chunk in chunks for ids in chunk.top_ids]
            assert tops == [
                expected[p - 1].topk(one.prompt_logprobs).indices.tolist() for p in positions
            ]
        else:
            assert not chunks


def test_prompt_logprobs_do_not_depend_on_the_cache(model_path: ModelPath) -> None:
    """A request for prompt log-probabilities computes its whole prompt, even if it is cached."""
    path = model_path("qwen3")
    wanting = [greedy(prompt_logprobs=1)] * 3
    fresh = Run(path, wanting)
    second = Run(path, wanting, warm=True)
    assert second.scheduler.totals.cached_tokens_total == 0
    for uid in range(3):
        values = [v for chunk in second.prompt[uid] for v in chunk.logprobs]
        expected = [v for chunk in fresh.prompt[uid] for v in chunk.logprobs]
        assert values == pytest.approx(expected, abs=1e-4)
        assert len(values) == len(prompts()[uid]) - 1
