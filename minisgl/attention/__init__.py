"""Attention over the paged KV pool behind one small interface."""

import logging

from minisgl.attention.base import (
    AttentionBackend,
    AttentionStep,
    DecodeGraphAttention,
    StepAttention,
)
from minisgl.attention.flashinfer_backend import (
    FlashInferAttention,
    default_prefill_variant,
    why_not_flashinfer,
)
from minisgl.attention.phased import PhasedAttention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import ConfigError
from minisgl.kvcache.pool import KVPool

__all__ = [
    "AttentionBackend",
    "AttentionStep",
    "DecodeGraphAttention",
    "StepAttention",
    "TorchAttention",
    "create_attention_backend",
]

logger = logging.getLogger(__name__)

_PREFILL = ("torch", "flashinfer", "flashinfer-fa2", "flashinfer-fa3")
_DECODE = ("torch", "flashinfer")


def create_attention_backend(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    """Make the backend called `name`: one name for both phases, or PREFILL,DECODE.

    auto takes FlashInfer where it can work, else torch; on a GPU that is said in a warning.
    q_heads: of this rank. Raises ConfigError that lists the known names, or says what is missing.
    """
    prefill, _, decode = name.partition(",")
    decode = decode or ("flashinfer" if prefill.startswith("flashinfer") else prefill)
    prefill, decode = _resolve(prefill, _PREFILL, pool), _resolve(decode, _DECODE, pool)
    shared: AttentionBackend | None = None
    if "torch" not in (prefill, decode):
        shared = _flashinfer(prefill, pool, q_heads)
    return PhasedAttention(
        prefill=shared or _one(prefill, pool, q_heads),
        decode=shared or _one(decode, pool, q_heads),
    )


def _resolve(name: str, known: tuple[str, ...], pool: KVPool) -> str:
    """A known name, with auto decided."""
    if name not in ("auto", *known):
        raise ConfigError(
            f"attention backend {name!r} is not known; known: auto, {', '.join(known)}"
        )
    reason = None if name == "torch" else why_not_flashinfer(pool)
    if reason is None:
        return "flashinfer" if name == "auto" else name
    if name != "auto":
        raise ConfigError(f"attention backend {name!r} cannot be used: {reason}")
    if pool.device.type == "cuda":
        logger.warning("attention falls back to torch, which is slow: flashinfer: %s", reason)
    return "torch"


def _one(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    return TorchAttention(pool) if name == "torch" else _flashinfer(name, pool, q_heads)


def _flashinfer(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    variant = name.removeprefix("flashinfer").removeprefix("-")
    return FlashInferAttention(pool, q_heads, variant or default_prefill_variant(pool.device))
