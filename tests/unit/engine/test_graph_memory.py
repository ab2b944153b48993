"""The memory that a CUDA graph uses outlives its capture.

A graph holds addresses and no tensors. On a CPU, the functions of each graph run once, and the
memory that they use is recorded. A graph keeps no reference to its functions.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.attention.base import AttentionStep, DecodeGraphAttention
from minisgl.attention.torch import TorchAttention
from minisgl.engine import graphs
from minisgl.engine.graphs import capture_steps
from tests.parity.driver import make_engine
from tests.parity.models import build_model
from tests.unit.engine.emulated_graphs import FixedAttention, largest_first
from tests.unit.scheduler.drafts import ChangingDrafts


class Used(TorchDispatchMode):
    """Records the storages that operations take and that no operation before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, StorageWeakRef] = {}
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is not torch.ops.aten.lift_fresh.default:  # takes a constant of the code
            self.taken |= storages((args, kwargs), known=self._made)
        result = func(*args, **(kwargs or {}))
        self._made |= storages(result, known=self.taken)
        return result


def storages(tree: object, known: Mapping[int, StorageWeakRef]) -> dict[int, StorageWeakRef]:
    """Return the storages of the tensors in `tree` that are not known, by their addresses."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    return {storage.cdata: storage for storage in found if storage.cdata not in known}


@pytest.mark.parametrize("drafting", [False, True])
@torch.inference_mode()
def test_the_memory_of_a_graph_outlives_its_capture(
    drafting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[StorageWeakRef] = []

    def capture(run: Callable[[], object], rehearse: Callable[[], object], memory: object) -> None:
        with Used() as mode:
            run()
        used.extend(mode.taken.values())

    def decode_graph(self: TorchAttention, size: int, step: AttentionStep) -> DecodeGraphAttention:
        return FixedAttention(self, step)

    monkeypatch.setattr(TorchAttention, "decode_graph", decode_graph)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    drafts = ChangingDrafts(7) if drafting else None
    engine = make_engine(build_model("qwen3", tmp_path), drafts=drafts, max_running_reqs=3)
    shapes, _ = engine._start.graph_sizes()
    captured = capture_steps(engine._launcher.parts, shapes, [], largest_first)
    gc.collect()
    assert len(captured.decode) == len(shapes)
    assert used
    assert not any(storage.expired() for storage in used)
