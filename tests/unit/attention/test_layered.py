"""Layers of different rules: the model fuses a step if the attention of every rule can."""

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionRule,
    AttentionStep,
    DecodeGraphAttention,
    FusedAttention,
    NormRope,
    StepAttention,
)
from minisgl.attention.registry import LayeredAttention

WINDOW = AttentionRule(window=4)


class Unfused:
    """Notes the layers of its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def compute_metadata(self) -> None:
        self.calls.append("metadata")

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.calls.append((layer, sinks))


class Fused(Unfused, FusedAttention):
    def attend(
        self, layer: int, qkv: Tensor, heads: NormRope, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        self.calls.append((layer, heads, sinks))


class Backend(AttentionBackend):
    """Gives `attention` for every step, and notes the tables of the steps."""

    def __init__(self, attention: Unfused, graph: Unfused | None) -> None:
        self.attention = attention
        self.graph = graph
        self.tables: list[Tensor] = []

    def prepare(self, step: AttentionStep) -> StepAttention:
        self.tables.append(step.page_table)
        return self.attention

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        self.tables.append(step.page_table)
        return self.graph


def make_step() -> AttentionStep:
    one, ints = np.ones(1, dtype=np.int32), torch.ones(1, dtype=torch.int32)
    tables = torch.zeros((2, 2, 5), dtype=torch.int32).unbind()
    return AttentionStep(1, one, one, ints, ints, ints, *tables)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_step_is_fused_if_all_parts_are(fused: bool, graph: bool) -> None:
    full, windows = Fused(), Fused() if fused else Unfused()
    backends = {WINDOW: Backend(windows, windows), PLAIN: Backend(full, full)}
    layered, step = LayeredAttention({**backends}, [WINDOW, PLAIN, WINDOW]), make_step()
    attention = layered.decode_graph(1, step) if graph else layered.prepare(step)
    assert attention is not None
    assert step.window_table is not None
    assert backends[WINDOW].tables[0] is step.window_table
    assert backends[PLAIN].tables[0] is step.page_table
    if graph:
        attention.compute_metadata()  # type: ignore[attr-defined]
        assert full.calls.pop() == windows.calls.pop() == "metadata"
    x, sinks = torch.zeros(1, 2, 4), torch.ones(2)
    heads = NormRope(None, None, 0.0, x)
    assert isinstance(attention, FusedAttention) == fused
    for layer in range(3):
        if isinstance(attention, FusedAttention):
            attention.attend(layer, x, heads, x, sinks)
        else:
            attention.forward(layer, x, x, sinks)
    expected = [(layer, heads, sinks) if fused else (layer, sinks) for layer in range(3)]
    assert windows.calls == expected[::2]
    assert full.calls == expected[1::2]


def test_a_graph_needs_the_attention_of_every_rule() -> None:
    backends = {WINDOW: Backend(Fused(), None), PLAIN: Backend(Fused(), Fused())}
    assert LayeredAttention({**backends}, [WINDOW, PLAIN]).decode_graph(1, make_step()) is None
