"""The attention backends by name, and the choice of the backends that a configuration runs."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    DecodeGraphAttention,
    FusedAttention,
    InTurn,
    NormRope,
    StepAttention,
)
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInferAttention, FlashInferFa2, FlashInferFa3
from minisgl.attention.images import plan_within_images
from minisgl.attention.torch import TorchAttention
from minisgl.attention.triton import TritonAttention
from minisgl.attention.trtllm import TrtllmAttention
from minisgl.build.flashinfer_jit import AttentionKernel
from minisgl.core.config import select_backend
from minisgl.kvcache.pool import KVPool

logger = logging.getLogger(__name__)

# In the order of preference: auto takes the first backend that can run.
ATTENTION_BACKENDS: tuple[type[AttentionBackend], ...] = (
    FlashInferAttention,
    TritonAttention,
    TorchAttention,
    FlashInferFa2,
    FlashInferFa3,
    TrtllmAttention,
    FlashAttention,
)


def create_attention_backend(
    name: str,
    pool: KVPool,
    q_heads: int,
    rules: Sequence[AttentionRule] = (PLAIN,),
    added: Sequence[type[AttentionBackend]] = (),
    windows: KVPool | None = None,
) -> AttentionBackend:
    """Make the backend called `name`.

    name: "auto", the name of one backend for both phases, or two names with a comma between them:
    first the backend for prefill, then the backend for decode.
    q_heads: query heads of this rank. rules: the rule of each KV layer, or one rule for all layers.
    added: backends of other packages. windows: the pool of window layers, if it is not `pool`.
    Raises ConfigError for an unknown name, and for a named backend that cannot run with this pool.
    If auto leaves prompts on a GPU to torch, a warning gives the reason.
    """

    def pool_of(rule: AttentionRule) -> KVPool:
        return pool if rule.window is None or windows is None else windows

    phases = {
        one: _phases_over(one, name, [rule for rule in rules if pool_of(rule) is one], added)
        for one in {pool_of(rule) for rule in rules}
    }

    def create(rule: AttentionRule) -> AttentionBackend:
        of_rule = pool_of(rule)
        prefill, decode = phases[of_rule]
        first = prefill(of_rule, q_heads, rule)
        shared = issubclass(prefill, decode)
        second = first if shared else decode(of_rule, q_heads, rule)
        return PhasedAttention(first, second, of_rule, rule)

    backends = {rule: create(rule) for rule in dict.fromkeys(rules)}
    if len(backends) == 1 and windows is None:
        return backends[rules[0]]
    return LayeredAttention(backends, rules)


def _phases_over(
    pool: KVPool,
    name: str,
    rules: Sequence[AttentionRule],
    added: Sequence[type[AttentionBackend]],
) -> tuple[type[AttentionBackend], type[AttentionBackend]]:
    """The backends of prefill and of decode for the layers of a pool. Raises ConfigError."""
    spec = pool.spec
    shape = (spec.dtype, spec.head_dim, pool.page_size)
    needs = AttentionNeeds(pool.device, *shape, frozenset(rules), spec.fp8)
    phases = resolve_phases(name, needs, added)
    reason = ATTENTION_BACKENDS[0].obstacle(needs)
    if "auto" in name and reason is not None and pool.device.type != "cpu":
        slow = "attention" if phases[1] is TorchAttention else "attention of prompts"
        logger.warning("%s runs on torch and is slow; flashinfer cannot run: %s", slow, reason)
    return phases


def attention_kernels(
    name: str,
    needs: Sequence[AttentionNeeds],
    archs: Sequence[int],
    added: Sequence[type[AttentionBackend]] = (),
) -> list[AttentionKernel]:
    """The FlashInfer modules that the backends called `name` run on GPUs of these architectures.

    needs: of the layers of each KV pool. archs: 90 means compute capability 9.0. Raises ConfigError
    as create_attention_backend does.
    """
    kernels = set()
    for of_pool in needs:
        prefill, decode = resolve_phases(name, of_pool, added)
        for rule in of_pool.rules:
            variants = prefill.kernel_variants(False, archs)
            if rule == PLAIN:  # decode under any other rule runs minisgl's kernel
                variants |= decode.kernel_variants(True, archs)
            kernels |= {rule.module(each, of_pool.dtype, of_pool.head_dim) for each in variants}
    return sorted(kernels, key=str)


def resolve_phases(
    name: str, needs: AttentionNeeds, added: Sequence[type[AttentionBackend]] = ()
) -> tuple[type[AttentionBackend], type[AttentionBackend]]:
    """The backends of prefill and of decode, with auto replaced by the selected backend."""
    known = {backend.name: backend for backend in (*ATTENTION_BACKENDS, *added)}
    prefill_name, _, decode_name = name.partition(",")
    prefill, decode = (
        select_backend("attention", phase, known, lambda one: one.obstacle(needs))
        for phase in (prefill_name, decode_name or prefill_name)
    )
    return prefill, decode


class PhasedAttention(AttentionBackend):
    """One backend for prefill chunks and one for decode requests, in the same step."""

    def __init__(
        self, prefill: AttentionBackend, decode: AttentionBackend, pool: KVPool, rule: AttentionRule
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._pool, self._rule = pool, rule

    def prepare(self, step: AttentionStep) -> StepAttention:
        """Plan a step of either phase, or of both: decode requests come first."""
        n, reqs = step.num_decode, len(step.start)
        if n == 0:
            return self._chunks(step)
        decode = self.decode.prepare(step.part(0, n))
        if n == reqs:
            return decode
        # Decode runs second: a step then takes 1.4 % less time than with decode first (8B, H200).
        prefill = self._chunks(step.part(n, reqs))
        return InTurn([(0, decode), (int(step.lengths[:n].sum()), prefill)])

    def _chunks(self, step: AttentionStep) -> StepAttention:
        causal = self.prefill.prepare(step)
        if step.spans:
            return plan_within_images(self._pool, self._rule, step, causal)
        return causal

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        return self.decode.decode_graph(size, step)


class LayeredAttention(AttentionBackend):
    """One backend for each rule of a model whose layers have different rules.

    rules: the rule of each KV layer.
    """

    def __init__(
        self, backends: dict[AttentionRule, AttentionBackend], rules: Sequence[AttentionRule]
    ) -> None:
        self.backends = backends
        self.of_layer = tuple(list(backends).index(rule) for rule in rules)

    def prepare(self, step: AttentionStep) -> StepAttention:
        parts = [each.prepare(_step_of(step, rule)) for rule, each in self.backends.items()]
        return self._layered(parts)

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        backends = self.backends.items()
        graphs = [each.decode_graph(size, _step_of(step, rule)) for rule, each in backends]
        return None if None in graphs else self._layered(graphs)

    def _layered(self, parts: Sequence[object]) -> "_Layered":
        fused = all(isinstance(part, FusedAttention) for part in parts)
        return (_FusedLayered if fused else _Layered)(parts, self.of_layer)


def _step_of(step: AttentionStep, rule: AttentionRule) -> AttentionStep:
    """The step with the page table of the layers of `rule`."""
    if rule.window is None or step.window_table is None:
        return step
    return step._replace(page_table=step.window_table)


class _Layered(NamedTuple):
    """Implements StepAttention: passes each layer on to the attention of its rule.

    It implements DecodeGraphAttention if all parts do.
    """

    parts: Sequence[Any]
    of_layer: tuple[int, ...]

    def compute_metadata(self) -> None:
        for part in self.parts:
            part.compute_metadata()

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.parts[self.of_layer[layer]].forward(layer, q, out, sinks)


class _FusedLayered(_Layered, FusedAttention):
    """All parts are a FusedAttention."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: NormRope,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        self.parts[self.of_layer[layer]].attend(layer, qkv, heads, out, sinks)
