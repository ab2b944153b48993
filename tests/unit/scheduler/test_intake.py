"""Every request that passes the validation is served or refused; none makes a rank fail."""

from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from minisgl.core import FinishReason, InvalidRequest, SamplingParams
from minisgl.core.sampling import RANGES
from minisgl.message.messages import AddReq
from minisgl.scheduler.request import accept_requests
from tests.examples import examples
from tests.unit.scheduler.fake_engine import VOCAB, FakeEngine
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.scripted import SCRIPTED

HUGE = 2**70
TOKEN = st.integers(0, VOCAB - 1) | st.integers(0, HUGE)
WHOLE = {name: st.integers(*map(int, RANGES[name])) for name in ("top_k", "seed", "min_tokens")}
PENALTY = st.floats(*RANGES["frequency_penalty"])
VALUES = {
    **WHOLE,
    "temperature": st.floats(*RANGES["temperature"]),
    "top_p": st.floats(*RANGES["top_p"], exclude_min=True),
    "min_p": st.floats(*RANGES["min_p"]),
    "max_tokens": st.none() | st.integers(*map(int, RANGES["max_tokens"])),
    "min_tokens": st.integers(0, 20) | WHOLE["min_tokens"],
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(TOKEN, max_size=3).map(tuple),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": st.floats(*RANGES["repetition_penalty"]),
    "logit_bias": st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3),
    "logprobs": st.none() | st.integers(*map(int, RANGES["logprobs"])),
}


@settings(max_examples=examples(200))
@given(st.fixed_dictionaries({}, optional=VALUES), st.integers(1, 23))
def test_valid_parameters_are_served_or_refused(given: dict[str, object], length: int) -> None:
    """Regression: one request with min_tokens 2147483647 ended the service."""
    sampling = {"max_tokens": None, **given}
    try:
        SamplingParams(**sampling).validate()  # type: ignore[arg-type]
    except InvalidRequest:
        sampling["max_tokens"] = None  # it was below min_tokens
    harness = Harness(FakeEngine(16, 2, max_seq_len=24))
    uid = harness.add([1] * length, **sampling)
    other = harness.add([2, 3], max_tokens=3, ignore_eos=True)
    harness.run()
    answer = harness.answers[uid]
    assert len(answer.finishes) == 1
    ids = {*sampling.get("stop_token_ids", ()), *sampling.get("logit_bias", ())}  # type: ignore[misc]
    max_tokens = sampling["max_tokens"] or 1
    refused = max(ids, default=0) >= VOCAB or length + max_tokens > 24  # type: ignore[operator]
    assert (answer.finishes == [FinishReason.ERROR]) == refused
    assert len(harness.answers[other].tokens) == 3


def test_the_parameters_of_a_call_are_checked_once_for_all_its_choices() -> None:
    """Regression: 1,000 choices with 1,024 entries of logit_bias held the scheduler for 0.8 s."""
    with patch.object(SamplingParams, "validate", autospec=True) as validate:
        params = SamplingParams(max_tokens=1, seed=2**63 - 2, prompt_logprobs=1)
        ids = np.array([1, 2], dtype="<i4").tobytes()
        message = AddReq(uid=1, token_ids=ids, sampling=params, count=40)
        validate.reset_mock()
        reqs = accept_requests(message, VOCAB, 64, 7, SCRIPTED)
    assert validate.call_count == 1
    assert [(req.uid, req.arrival_index) for req in reqs] == [(1 + i, 7 + i) for i in range(40)]
    assert [req.sampling.seed for req in reqs[:3]] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [req.sampling.prompt_logprobs for req in reqs[:2]] == [1, None]
