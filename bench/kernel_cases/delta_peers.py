"""The rule of gated delta nets alone: ours, and those of fla-core and FlashInfer if installed.

All get the same tokens after the convolution (kernel/delta.py: Inputs). FlashInfer has the rule for
prompts since 0.6, and runs it in bfloat16 on GPUs since Hopper.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn import functional

from bench.kernel_cases.states import PAGE, filled_memory, normal, step_of
from minisgl.kernel.delta import Inputs
from minisgl.layers.delta import DeltaSpec

Case = tuple[str, int, Callable[[], Callable[[], object]]]  # the fields of a kernels.Case


def rule_cases(model: str, spec: DeltaSpec, prompts: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of prompts of these tokens, and those of decode steps of fla-core."""
    makers = {"ours": _ours}
    if find_spec("fla") is not None:
        makers["fla-core"] = _fla
    if find_spec("flashinfer") is not None and _flashinfer_is_ready():
        makers["flashinfer"] = _flashinfer
    # Each token has its query, key, value and output; the state is written once.
    token = 2 * (2 * spec.key_heads * spec.key_dim + 2 * spec.value_heads * spec.value_dim)
    state = 4 * spec.value_heads * spec.key_dim * spec.value_dim
    for peer, make in makers.items():
        for tokens in prompts:
            name = f"delta rule {peer} {model} {tokens} tokens"
            yield name, tokens * token + state, partial(make, spec, tokens)
    if "fla-core" in makers:
        for rows in (1, 64, 256):
            name = f"delta rule fla-core {model} {rows} rows"
            yield name, rows * (token + 2 * state), partial(_fla_step, spec, rows)


def _flashinfer_is_ready() -> bool:
    """Return whether a call of FlashInfer's rule compiles no C++.

    0.6 compiles 66 files at its first call, for minutes even on 16 cores. 0.7 has no C++ here.
    """
    if find_spec("flashinfer.jit.gdn") is None:
        return True
    module = importlib.import_module("flashinfer.jit.gdn")
    return bool(module.gen_gdn_prefill_sm90_module().is_compiled)


def _inputs(spec: DeltaSpec, tokens: int) -> Inputs:
    """Return random tokens: neighbours remember about ten tokens."""
    q, k = (
        functional.normalize(normal(tokens, spec.key_heads, spec.key_dim), dim=-1) for _ in range(2)
    )
    v = normal(tokens, spec.value_heads, spec.value_dim)
    g, beta = torch.rand(2, tokens, spec.value_heads, device=v.device)
    return Inputs(q * spec.key_dim**-0.5, k, v, -0.2 * g, beta)


def _ours(spec: DeltaSpec, tokens: int) -> Callable[[], object]:
    """The state of the last page boundary is written. A copy of g is part of the time."""
    from minisgl.kernel.triton.delta_chunk import run_rule

    inputs, memory = _inputs(spec, tokens + 1), filled_memory(spec, 1)
    step, out = step_of(torch.zeros(1), torch.tensor([tokens + 1])), torch.empty_like(inputs.v)
    assert tokens % PAGE == 0, "the last boundary is at the end of the tokens; this is a bug"
    return lambda: run_rule(inputs._replace(g=inputs.g.clone()), memory, step, out)


def _fla(spec: DeltaSpec, tokens: int) -> Callable[[], object]:
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    inputs = [part.unsqueeze(0) for part in _inputs(spec, tokens)]
    return lambda: rule(*inputs, scale=1.0, output_final_state=True)


def _fla_step(spec: DeltaSpec, rows: int) -> Callable[[], object]:
    """A decode step. The states are gathered, and the new ones are not put back."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    inputs = [part.unsqueeze(1) for part in _inputs(spec, rows)]
    q, k, v, g, beta = inputs
    state = filled_memory(spec, rows).state.contiguous()
    given = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    return lambda: rule(q, k, v, g, beta=beta, **given)


def _flashinfer(spec: DeltaSpec, tokens: int) -> Callable[[], object]:
    """The state has the values' channels first. g is the factor of a token, not its logarithm."""
    rule = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    q, k, v, g, beta = _inputs(spec, tokens)
    ends = torch.tensor([0, tokens], device=q.device)
    size = (1, spec.value_heads, spec.value_dim, spec.key_dim)
    state, out = torch.empty(size, device=q.device), torch.empty_like(v)
    given = {"output_final_state": True, "cu_seqlens": ends, "output": out, "output_state": state}
    factor = g.exp()
    return lambda: rule(q, k, v, factor, beta, 1.0, **given)
