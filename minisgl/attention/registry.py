"""The attention backends by name, and which of them a configuration runs.

This is a file of its own because the package has modules named torch and flashinfer, which hide the
libraries of the same names inside __init__.py.
"""

import logging
from collections.abc import Sequence

import torch

from minisgl.attention.base import AttentionBackend
from minisgl.attention.flashinfer import (
    FlashInferAttention,
    prefill_variants,
    why_not_flashinfer,
)
from minisgl.attention.phased import PhasedAttention
from minisgl.attention.torch import TorchAttention
from minisgl.core import ConfigError
from minisgl.kernel import AttentionKernel
from minisgl.kvcache.pool import KVPool

logger = logging.getLogger(__name__)

_PREFILL = ("torch", "flashinfer", "flashinfer-fa2", "flashinfer-fa3")
_DECODE = ("torch", "flashinfer")


def create_attention_backend(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    """Make the backend called `name`: one name for both phases, or PREFILL,DECODE.

    auto takes FlashInfer where it can work, else torch; on a GPU that is said in a warning.
    q_heads: of this rank. Raises ConfigError that lists the known names, or says what is missing.
    """
    prefill, decode = resolve_phases(name, pool.device, pool.dtype, pool.head_dim)
    reason = why_not_flashinfer(pool.device, pool.dtype, pool.head_dim)
    if "auto" in name and reason is not None and pool.device.type != "cpu":
        logger.warning("attention falls back to torch, which is slow: flashinfer: %s", reason)
    first = _one(prefill, pool, q_heads)
    shared = "torch" not in (prefill, decode)
    return PhasedAttention(first, first if shared else _one(decode, pool, q_heads))


def attention_kernels(
    name: str, dtype: torch.dtype, head_dim: int, archs: Sequence[int]
) -> list[AttentionKernel]:
    """The FlashInfer modules that the backends called `name` run on GPUs of these architectures.

    archs: 90 means compute capability 9.0. Raises ConfigError as create_attention_backend does.
    """
    prefill, decode = resolve_phases(name, torch.device("cuda"), dtype, head_dim)
    variants = {"fa2"} if decode == "flashinfer" else set()
    if prefill.startswith("flashinfer"):
        variants |= {variant for arch in archs for variant in prefill_variants(prefill, arch)}
    return [AttentionKernel(variant, dtype, head_dim) for variant in sorted(variants)]


def resolve_phases(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, str]:
    """The backends of prefill and of decode, with auto replaced by the backend that it means."""
    prefill, _, decode = name.partition(",")
    decode = decode or ("flashinfer" if prefill.startswith("flashinfer") else prefill)
    reason = why_not_flashinfer(device, dtype, head_dim)
    return _resolve(prefill, _PREFILL, reason), _resolve(decode, _DECODE, reason)


def _resolve(name: str, known: tuple[str, ...], reason: str | None) -> str:
    """One of the known names. reason: why FlashInfer cannot be used, None if it can."""
    if name not in ("auto", *known):
        raise ConfigError(
            f"attention backend {name!r} is not known; known: auto, {', '.join(known)}"
        )
    if name == "auto":
        return "flashinfer" if reason is None else "torch"
    if name != "torch" and reason is not None:
        raise ConfigError(f"attention backend {name!r} cannot be used: {reason}")
    return name


def _one(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(pool)
    major, minor = torch.cuda.get_device_capability(pool.device)
    return FlashInferAttention(pool, q_heads, prefill_variants(name, 10 * major + minor))
