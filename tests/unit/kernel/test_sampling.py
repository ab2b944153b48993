"""The sampler: greedy rows, exact draws, the tokens that filters keep, and unusable rows."""

import math
from typing import Any

import pytest
import torch

from minisgl.kernel.dispatch import best_candidate, local_candidate, sample
from minisgl.kernel.sampling import SampledTokens, SamplingTensors


def params(n: int, **columns: Any) -> SamplingTensors:
    """Each column is one value for all rows, or one for each. The default temperature is 1."""
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= {"seed": list(range(n)), "position": 0} | columns

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        value = values[name]
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=dtype)

    tensors = {
        "temperature": column("temperature", torch.float32),
        "top_k": column("top_k", torch.int32),
        "top_p": column("top_p", torch.float32),
        "min_p": column("min_p", torch.float32),
    }
    drawn = tensors["temperature"] > 0
    asks = (tensors["top_k"] > 0) | (tensors["top_p"] < 1) | (tensors["min_p"] > 0)
    return SamplingTensors(
        **tensors,
        seed=column("seed", torch.int64),
        position=column("position", torch.int32),
        any_random=bool(drawn.any()),
        filters=bool((drawn & asks).any()),
    )


def draw(probs: list[float], n: int = 4000, **columns: Any) -> dict[int, float]:
    """The share of each token among n draws with different seeds."""
    logits = torch.tensor(probs).log().repeat(n, 1)
    tokens, finite = sample(logits, params(n, **columns))
    assert finite.all()
    counts = torch.bincount(tokens, minlength=len(probs)) / n
    return {token: share for token, share in enumerate(counts.tolist()) if share > 0}


PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]


def test_greedy_takes_the_first_largest_and_ignores_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    tokens, _ = sample(logits, params(2, temperature=0.0, top_k=1, top_p=0.1))
    assert tokens.tolist() == [1, 0]
    assert tokens.dtype == torch.int32


def test_draws_follow_the_softmax() -> None:
    assert draw(PROBS) == pytest.approx(dict(enumerate(PROBS)), abs=0.03)


def test_temperature_sharpens() -> None:
    squared = [p * p for p in PROBS]
    expected = {i: p / sum(squared) for i, p in enumerate(squared)}
    assert draw(PROBS, temperature=0.5) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        # top_k applies first: of {0.4, 0.3}, renormalised, 0.571 alone reaches 0.55.
        ({"top_k": 2, "top_p": 0.55}, {1}),
        ({"top_k": 4, "min_p": 0.5}, {1, 3}),
    ],
)
def test_filters_keep_the_expected_tokens(asked: dict[str, float], kept: set[int]) -> None:
    shares = draw(PROBS, n=2000, **asked)
    total = sum(PROBS[token] for token in kept)
    assert shares == pytest.approx({token: PROBS[token] / total for token in kept}, abs=0.04)


def test_top_p_applies_after_temperature() -> None:
    """At temperature 0.5 the first token has probability 0.55, so top_p 0.5 keeps no other."""
    assert set(draw(PROBS, n=500, temperature=0.5, top_p=0.5)) == {1}
    assert set(draw(PROBS, n=500, top_p=0.5)) == {1, 3}


def test_ties_with_the_last_kept_token_are_kept() -> None:
    assert set(draw([0.4, 0.2, 0.2, 0.2], n=500, top_k=2)) == {0, 1, 2, 3}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert draw(PROBS, n=50, temperature=1e-38) == {1: 1.0}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((100, 8), -math.inf)
    logits[:, 5] = -3.0
    tokens, finite = sample(logits, params(100, top_p=0.9))
    assert set(tokens.tolist()) == {5}
    assert finite.all()


def test_rows_do_not_depend_on_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator) * 2
    columns = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 0.0, 1.0],
        "top_k": [0, 5, 0, 0, 3, 0],
        "top_p": [1.0, 1.0, 0.8, 1.0, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.05, 0.0, 0.0],
        "seed": [1, 2, 3, 4, 5, 6],
        "position": [10, 20, 30, 40, 50, 60],
    }
    together = sample(logits, params(6, **columns)).tokens
    for row in range(6):
        one = {name: [values[row]] for name, values in columns.items()}
        alone: SampledTokens = sample(logits[row : row + 1], params(1, **one))
        assert alone.tokens.tolist() == [together[row].item()]


def test_unusable_rows_are_marked_and_leave_others_alone() -> None:
    logits = torch.zeros(5, 4)
    logits[0, 2] = math.nan
    logits[1, 1] = math.inf
    logits[2] = -math.inf
    logits[3, :3] = -math.inf
    for temperature in (0.0, 1.0):
        for top_p in (1.0, 0.5):
            asked = params(5, temperature=temperature, top_p=top_p)
            tokens, finite = sample(logits, asked)
            assert finite.tolist() == [False, False, False, True, True]
            assert tokens[3] == 3
            assert all(0 <= token < 4 for token in tokens.tolist())


@pytest.mark.parametrize("width", [16, 48, 112, 304])
def test_parts_of_the_logits_give_the_token_of_all(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(200, 300, generator=generator) * 2
    logits[0] = logits[1] = 0.0  # all logits are equal, so the first token wins
    logits[2, :width] = -math.inf
    logits[3, 7] = logits[4, 299] = math.nan
    logits[5, 18] = math.inf
    logits[6] = -math.inf
    asked = params(200, temperature=[(0.0, 1.0, 0.6, 1e-38)[row % 4] for row in range(200)])
    parts = [
        local_candidate(logits[:, begin : begin + width], asked, begin)
        for begin in range(0, 300, width)
    ]
    tokens, finite = best_candidate(torch.stack(parts), asked)
    expected = sample(logits, asked)
    assert finite.tolist() == expected.finite.tolist()
    assert (~finite).nonzero().flatten().tolist() == [2, 3, 4, 5, 6][width < 300 :]
    assert tokens[finite].tolist() == expected.tokens[finite].tolist()
    assert tokens[0] == 0
    assert ((tokens >= 0) & (tokens < 300)).all()
