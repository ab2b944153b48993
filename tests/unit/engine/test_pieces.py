"""A graph for the work after the last attention of a forward, if and only if there is such work.

On a CPU, the operations of torch take the place of kernels.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.states import RowStates
from minisgl.kernel.states import StateStep, begin_states
from tests.parity.driver import make_engine
from tests.parity.hybrid_models import MODELS
from tests.parity.models import FAMILIES, save_config

CONFIGS = MODELS | FAMILIES
# Gates (Qwen3.5, Muse Glimmer) and inputs of layers (Gemma 4 E2B) follow the last attention.
WITH_WORK = {"qwen3_5", "qwen3_next", "muse-glimmer", "gemma4-shared"}


class LastAttention(TorchDispatchMode):
    """Takes the place of attention. later: the operations after the last call that are no views."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left, self.later = calls, list[str]()

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        out.zero_()
        self.left -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not self.left and not func.is_view:
            self.later.append(str(func))
        return func(*args, **(kwargs or {}))


def _one_request(states: RowStates) -> StateStep:
    """All five tokens are the prompt of row 0."""
    zero, five = torch.tensor([0], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    reqs = (zero, zero, five, zero)
    out = torch.empty((6, 1), dtype=torch.int32)
    begin_states(states.boundaries, *reqs, 0, states.page_size, 5, 5, out)
    return StateStep.of(out, chunks=1)


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_work_after_the_last_attention_is_known(name: str, tmp_path: Path) -> None:
    """Without a graph, steps in pieces would leave out this work."""
    path = save_config(CONFIGS[name](), tmp_path)
    runner = make_engine(path, dummy_weight=True, page_size=16)._launcher.runner
    tokens = torch.zeros((len(runner.padding), 5), dtype=torch.int32)
    tokens[:] = torch.tensor(runner.padding)[:, None]
    states = None if runner.states is None else _one_request(runner.states)
    with LastAttention(len(runner.model.config.attention)) as mode:
        runner.run(tokens, mode, states=states)
    assert bool(mode.later) != runner.model.model.layers[-1].ends_with_attention
    if name in WITH_WORK:
        assert mode.later
