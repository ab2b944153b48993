"""The reference of gated delta nets, against transformers' recurrence over whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    l2norm,
    torch_recurrent_gated_delta_rule,
)

from minisgl.kernel.delta import (
    TAPS,
    DeltaMemory,
    DeltaWeights,
    GatedNorm,
    gated_delta,
    gated_norm,
)
from minisgl.kernel.states import StateStep, begin_states
from tests.examples import examples

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def memory(rows: int, page_size: int, drafts: bool) -> DeltaMemory:
    """Poisoned memory: a value that is read before it is written reaches the output."""
    shapes = DeltaMemory(
        (VALUE_HEADS, KEY_DIM, VALUE_DIM),
        (TAPS - 1, CHANNELS),
        (2 * page_size, KEY_HEADS, KEY_DIM),
        ((2 if drafts else 1) * page_size, VALUE_HEADS, VALUE_DIM),
        (2 * page_size, VALUE_HEADS),
        (16 if drafts else 4, CHANNELS),
    )
    return DeltaMemory(*(torch.full((rows, *shape), torch.nan) for shape in shapes))


def weights() -> DeltaWeights:
    conv = torch.randn(CHANNELS, TAPS)
    return DeltaWeights(conv, torch.rand(VALUE_HEADS).log(), torch.randn(VALUE_HEADS))


def norm(tokens: int) -> GatedNorm:
    """A norm whose eps is large, so that it does not magnify the errors of small outputs."""
    weight, gate = torch.arange(1.0, 1 + VALUE_DIM), torch.ones(tokens, VALUE_HEADS * VALUE_DIM)
    return GatedNorm(weight, gate, 1.0)


def expected(mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights) -> Tensor:
    """One whole sequence, [n, ...], by transformers, with our norm of the output."""
    padded = functional.pad(mixed.T, (TAPS - 1, 0)).unsqueeze(0)
    x = functional.conv1d(padded, weights.conv.unsqueeze(1), groups=CHANNELS)[0].T
    x = functional.silu(x).unsqueeze(0)
    keys = KEY_HEADS * KEY_DIM
    q, k = (x[..., i * keys :][..., :keys].unflatten(2, (KEY_HEADS, KEY_DIM)) for i in (0, 1))
    v = x[..., 2 * keys :].unflatten(2, (VALUE_HEADS, VALUE_DIM))
    q, k = (y.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for y in (q, k))
    g = -weights.a_log.exp() * functional.softplus(a + weights.dt_bias)
    out, _ = torch_recurrent_gated_delta_rule(
        l2norm(q), l2norm(k), v, g.unsqueeze(0), b.sigmoid().unsqueeze(0), None, False
    )
    return gated_norm(out[0], *norm(len(mixed)))


class Rows:
    """Runs steps of one request in row 1 of two, as the engine does."""

    def __init__(self, page_size: int, drafts: bool) -> None:
        self.memory = memory(2, page_size, drafts)
        self.boundaries = torch.zeros(2, dtype=torch.int32)
        self.weights = weights()

    def run(self, mixed: Tensor, a: Tensor, b: Tensor, start: int, decode: bool) -> Tensor:
        row, begin, length, first = (
            torch.tensor([n], dtype=torch.int32) for n in (1, start, len(mixed), 0)
        )
        out, requests = row.new_empty(6, 1), (row, begin, length, first)
        size, count = self.memory.page_size, len(mixed)
        begin_states(self.boundaries, *requests, int(decode), size, count, count, out)
        step = StateStep.of(out, chunks=int(not decode))
        return gated_delta(mixed, a, b, self.weights, self.memory, step, norm(count))


@settings(max_examples=examples(60))
@given(data=st.data(), drafts=st.booleans(), seed=st.integers(0, 2**31))
def test_any_chunks_drafts_and_rejections_give_the_recurrence(
    data: st.DataObject, drafts: bool, seed: int
) -> None:
    """The state at its boundary is that of the accepted tokens, after every step."""
    torch.manual_seed(seed)
    size, length = 4, 45
    rows = Rows(size, drafts)
    mixed, a, b = torch.randn(length, CHANNELS), *torch.randn(2, length, VALUE_HEADS)
    want = expected(mixed, a, b, rows.weights)
    start, prompt = 0, data.draw(st.integers(1, 30))
    while start < prompt:
        end = data.draw(st.integers(start + 1, prompt))
        out = rows.run(mixed[start:end], a[start:end], b[start:end], start, decode=False)
        torch.testing.assert_close(out, want[start:end], atol=2e-5, rtol=1e-4)
        start = end
    while start < length:
        width = data.draw(st.sampled_from((1, 2, 4) if drafts else (1,)))
        accepted = min(data.draw(st.integers(1, width)), length - start)
        wrong = torch.randn(width, CHANNELS), *torch.randn(2, width, VALUE_HEADS)
        parts = (x[start : start + accepted] for x in (mixed, a, b))
        tokens = [torch.cat((right, x[accepted:])) for right, x in zip(parts, wrong, strict=False)]
        out = rows.run(*(x[:width] for x in tokens), start, decode=True)
        torch.testing.assert_close(
            out[:accepted], want[start : start + accepted], atol=2e-5, rtol=1e-4
        )
        assert rows.boundaries[1] == start // size * size
        start += accepted


def test_rows_do_not_touch_each_other() -> None:
    rows = Rows(4, drafts=False)
    rows.run(torch.randn(9, CHANNELS), *torch.randn(2, 9, VALUE_HEADS), 0, decode=False)
    assert all(part[0].isnan().all() for part in rows.memory)
    assert not rows.memory.state[1].isnan().any()


@pytest.mark.parametrize("part", ["state", "keys", "deltas", "decays", "inputs"])
def test_every_part_of_the_memory_decides_the_output(part: str) -> None:
    torch.manual_seed(0)
    rows = Rows(4, drafts=False)
    tokens = torch.randn(12, CHANNELS), *torch.randn(2, 12, VALUE_HEADS)
    rows.run(*(x[:11] for x in tokens), 0, decode=False)
    want = expected(*tokens, rows.weights)[11:]
    getattr(rows.memory, part)[1].zero_()
    out = rows.run(*(x[11:] for x in tokens), 11, decode=True)
    assert (out - want).abs().max() > 1e-2
