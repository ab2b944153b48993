"""A sampling parameter out of its range is rejected with an error that names it."""

import math
from typing import Any

import msgspec
import pytest

from minisgl.core import InvalidRequest, SamplingParams
from minisgl.core.sampling import MAX_SEED


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, 2.1, math.nan, math.inf, "hot", None)),
        ("top_k", (-2, 2**31, 0.5, None)),
        ("top_p", (0, 1.1, math.nan)),
        ("min_p", (-0.1, 1.1)),
        ("seed", (MAX_SEED + 1, -MAX_SEED - 2)),
        ("max_tokens", (0, -1, 2.5)),
        ("choice", ((), "abc")),
        ("min_tokens", (-1,)),
        ("frequency_penalty", (-2.1, 2.1)),
        ("repetition_penalty", (0.0, 101, math.nan)),
        ("logprobs", (-1, 21)),
        ("prompt_logprobs", (21,)),
        ("stop_token_ids", ((3, -1),)),
        ("logit_bias", ([5], 5, {"a": 1.0}, {3: "b"}, {-1: 1.0}, {3: 101.0}, {3: math.nan})),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{name} must ") as refused:
            SamplingParams(**{name: value})
        assert refused.value.param == name


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams()
    least: dict[str, Any] = {"temperature": 0, "top_k": -1, "min_p": 0, "seed": -MAX_SEED - 1}
    SamplingParams(**least, max_tokens=1, min_tokens=1, repetition_penalty=0.01)
    most: dict[str, Any] = {"temperature": 2, "top_k": 2**31 - 1, "top_p": 1, "seed": MAX_SEED}
    SamplingParams(**most, logprobs=20, logit_bias={0: 100.0})


def test_copies_and_decoded_parameters_are_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="top_p must be above 0"):
        msgspec.structs.replace(SamplingParams(), top_p=0)
    with pytest.raises(InvalidRequest, match="max_tokens must be from 1"):
        msgspec.convert({"max_tokens": 0}, SamplingParams)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens must not exceed max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
