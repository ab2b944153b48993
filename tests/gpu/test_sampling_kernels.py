"""The sampling kernels give the tokens of the torch reference for all sampling parameters.

Kernel and reference round differently. The tokens of a row may therefore differ if two candidates
nearly tie. The tests check that each difference is such a tie, and that there are few. With
TRITON_INTERPRET=1 the tests run on a CPU.
"""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import sampling
from minisgl.kernel.random import gumbel_noise
from minisgl.kernel.sampling import GROUP, GROUP_STREAM, SamplingTensors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCAB = 5_003 if INTERPRETED else 151_936
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]


def params(n: int, **columns: Any) -> SamplingTensors:
    """Each column is one value for all rows, or one for each. The default temperature is 1."""
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= {"seed": torch.randint(-(2**62), 2**62, (n,)).tolist()}
    values |= {"position": torch.randint(0, 40_000, (n,)).tolist()} | columns

    def column(name: str, dtype: torch.dtype) -> Tensor:
        value = values[name]
        filled = value if isinstance(value, list) else [value] * n
        return torch.tensor(filled, dtype=dtype, device=DEVICE)

    return SamplingTensors(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        position=column("position", torch.int32),
        any_random=True,
        filters=any(values[name] != off for name, off in (("top_k", 0), ("top_p", 1.0)))
        or values["min_p"] != 0.0,
    )


def lead(logits: Tensor, asked: SamplingTensors, row: int, ours: int, theirs: int) -> float:
    """Return the score of the reference's token minus the score of the kernel's token.

    Scores are in float64, with float32 noise. If both tokens are in one group of ids, the scores
    are those of the ids, otherwise those of the two groups.
    """
    scaled = logits[row].double() / asked.temperature[row].double()
    seed, position = asked.seed[row : row + 1], asked.position[row : row + 1]
    if ours // GROUP == theirs // GROUP:
        noise = gumbel_noise(seed, position, len(scaled))[0].double()
        return float((scaled[theirs] + noise[theirs]) - (scaled[ours] + noise[ours]))
    noise = gumbel_noise(seed, position, -(-len(scaled) // GROUP), stream=GROUP_STREAM)[0].double()
    found = [
        scaled[group * GROUP : (group + 1) * GROUP].logsumexp(0) + noise[group]
        for group in (theirs // GROUP, ours // GROUP)
    ]
    return float(found[0] - found[1])


def check(logits: Tensor, asked: SamplingTensors, allowed: float = 0.02) -> Tensor:
    """Compare with the reference, and return the kernel's tokens."""
    from minisgl.kernel.triton import sampling as kernels

    before = logits.clone()
    expected = sampling.sample(logits.float(), asked)
    out = kernels.sample(logits, asked)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.finite, expected.finite)
    assert out.tokens.dtype == torch.int32
    assert ((out.tokens >= 0) & (out.tokens < logits.shape[1])).all()
    differ = (out.tokens != expected.tokens) & expected.finite
    greedy = asked.temperature == 0
    assert not (differ & greedy).any()
    assert differ.float().mean() <= allowed
    if not asked.filters:
        for row in differ.nonzero().flatten().tolist():
            assert (
                abs(lead(logits, asked, row, int(out.tokens[row]), int(expected.tokens[row])))
                < 1e-4
            )
    return out.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_greedy_and_plain_rows(dtype: torch.dtype, rows: int) -> None:
    rows = min(rows, 6) if INTERPRETED else rows
    logits = (torch.randn(rows, VOCAB, device=DEVICE) * 3).to(dtype)
    temperature = [(0.0, 0.6, 1.0, 2.0, 1e-3)[row % 5] for row in range(rows)]
    check(logits, params(rows, temperature=temperature))
    check(logits, replace(params(rows, temperature=0.0), any_random=False))


@pytest.mark.parametrize("vocab", [1, 7, 2048, 4097])
def test_any_width_and_strided_rows(vocab: int) -> None:
    logits = torch.randn(4, vocab + 9, device=DEVICE)[:, :vocab]
    check(logits, params(4, temperature=[0.0, 1.0, 1.0, 0.5]))
    check(logits, params(4, temperature=[0.0, 1.0, 1.0, 0.5], top_k=[0, 3, 0, 1]))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    logits[1, 3000] = logits[1, 4999] = logits[1, 4000] = 2.0
    tokens = check(logits, params(2, temperature=0.0))
    assert tokens.tolist() == [0, 3000]


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 10**6},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 2000, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_filters(asked: dict[str, float], spread: float) -> None:
    """With spread 0.5 more candidates remain than the list holds, with spread 8 a few."""
    rows = 3 if INTERPRETED else 48
    logits = torch.randn(rows, VOCAB, device=DEVICE) * spread
    temperature = [(0.7, 1.0, 0.0)[row % 3] for row in range(rows)]
    check(logits, params(rows, temperature=temperature, **asked), allowed=0.05)


def test_filters_keep_exactly_the_tokens_of_the_reference() -> None:
    """Many draws from one row with a few kept tokens reach each of them and no other."""
    rows = 16 if INTERPRETED else 400
    row = torch.randn(VOCAB, device=DEVICE) * 4
    logits = row.repeat(rows, 1)
    for asked in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}):
        check(logits, params(rows, **asked), allowed=0.005)
    logits[:, :4] = logits.max() + 1.0
    tokens = check(logits, params(rows, top_k=2))
    assert set(tokens.tolist()) <= {0, 1, 2, 3}
    assert len(set(tokens.tolist())) > 2  # ties with the second are kept


def test_rows_of_all_kinds_together() -> None:
    logits = torch.randn(6, VOCAB, device=DEVICE) * 3
    asked = params(
        6,
        temperature=[0.0, 1.0, 0.7, 1.3, 0.0, 1.0],
        top_k=[0, 5, 0, 0, 3, 0],
        top_p=[1.0, 1.0, 0.8, 1.0, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.0],
    )
    check(logits, asked, allowed=0.0)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_unusable_rows_are_marked(top_p: float) -> None:
    logits = torch.randn(7, VOCAB, device=DEVICE)
    logits[0, 4321] = math.nan
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[3, :] = -math.inf
    logits[3, 5] = -2.0
    logits[4, 100:] = -math.inf
    logits[5] = math.nan
    for temperature in (0.0, 1.0, 1e-38):
        tokens = check(logits, params(7, temperature=temperature, top_p=top_p))
        assert tokens[3] == 5
        assert tokens[4] < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_of_the_logits_give_the_token_of_all(parts: int, dtype: torch.dtype) -> None:
    """The vocabulary is cut as ranks cut it: each part makes its offer, and the best one wins."""
    from minisgl.kernel.triton import sampling as kernels

    rows = 12 if INTERPRETED else 256
    logits = (torch.randn(rows, VOCAB + 3, device=DEVICE) * 3).to(dtype)[:, :VOCAB]
    logits[0] = 1.0
    logits[1, : VOCAB // 2] = -math.inf
    logits[2, VOCAB - 1] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    temperature = [(0.0, 0.6, 1.0, 1e-38)[row % 4] for row in range(rows)]
    asked = params(rows, temperature=temperature)
    width = -(-VOCAB // (parts * GROUP)) * GROUP
    begins = range(0, VOCAB, width)
    candidates = [kernels.local_candidate(logits[:, at : at + width], asked, at) for at in begins]
    tokens, finite = kernels.best_candidate(torch.stack(candidates), asked)
    expected = kernels.sample(logits, asked)
    assert torch.equal(finite, expected.finite)
    assert finite.logical_not().nonzero().flatten().tolist() == [2, 3, 4]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    for row in ((tokens != expected.tokens) & finite).nonzero().flatten().tolist():
        assert temperature[row] > 0
        gap = lead(logits, asked, row, int(tokens[row]), int(expected.tokens[row]))
        assert abs(gap) < 1e-4
    assert (tokens != expected.tokens)[finite].float().mean() <= 0.02


def test_sampler_replays_in_a_cuda_graph() -> None:
    if INTERPRETED:
        pytest.skip("the interpreter has no CUDA graphs")
    from minisgl.kernel.triton import sampling as kernels

    logits = torch.randn(8, VOCAB, device=DEVICE)
    asked = params(8, top_p=0.9)
    kernels.sample(logits, asked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.sample(logits, asked)
    for step in range(3):
        logits.copy_(torch.randn(8, VOCAB, device=DEVICE) * 4)
        asked.position.fill_(step)
        asked.temperature.copy_(torch.tensor([0.0, 1.0] * 4))
        out.tokens.fill_(-1)
        graph.replay()
        assert torch.equal(out.tokens, sampling.sample(logits, asked).tokens)
