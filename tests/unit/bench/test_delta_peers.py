"""The peers of the rule of gated delta nets, with a stand-in for FlashInfer."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from bench.kernel_cases.delta_peers import rule_cases
from minisgl.layers.delta import DeltaSpec


@pytest.mark.parametrize("compiled", [False, True])
def test_flashinfer_has_rows_if_its_kernels_are_compiled(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of FlashInfer 0.6 would otherwise compile for minutes."""
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.gdn"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    made = SimpleNamespace(is_compiled=compiled)
    monkeypatch.setattr(module, "gen_gdn_prefill_sm90_module", lambda: made, raising=False)
    names = [name for name, *_ in rule_cases("m", DeltaSpec(1, 2, 32, 32, layer=0), (64,))]
    assert ("delta rule flashinfer m 64 tokens" in names) == compiled
    assert "delta rule ours m 64 tokens" in names
