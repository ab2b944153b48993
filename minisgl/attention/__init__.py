"""Attention over the paged KV pool behind one small interface."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.attention.base import (
    AttentionBackend,
    AttentionStep,
    DecodeGraphAttention,
    FusedAttention,
    StepAttention,
)
from minisgl.attention.flashinfer import (
    FlashInferAttention,
    MetaAttention,
    prefill_variants,
    why_not_flashinfer,
)
from minisgl.attention.phased import PhasedAttention
from minisgl.attention.torch import TorchAttention
from minisgl.core import ConfigError
from minisgl.kernel import compile_flashinfer
from minisgl.kvcache.pool import KVPool

__all__ = [
    "AttentionBackend",
    "AttentionStep",
    "DecodeGraphAttention",
    "FusedAttention",
    "StepAttention",
    "TorchAttention",
    "attention_kernels",
    "compile_attention",
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
    prefill, decode = _phases(name, pool)
    reason = why_not_flashinfer(pool)
    if "auto" in name and reason is not None and pool.device.type != "cpu":
        logger.warning("attention falls back to torch, which is slow: flashinfer: %s", reason)
    first = _one(prefill, pool, q_heads)
    shared = "torch" not in (prefill, decode)
    return PhasedAttention(first, first if shared else _one(decode, pool, q_heads))


def compile_attention(name: str, pool: KVPool, archs: Sequence[int], folder: Path) -> None:
    """Compile what those backends need on GPUs of `archs` (90 for 9.0) into `folder`.

    pool: on the device meta. Raises ConfigError as create_attention_backend does.
    """
    if variants := _variants(name, pool, archs):
        compile_flashinfer(folder, pool.dtype, pool.head_dim, sorted(variants), archs)


def attention_kernels(name: str, pool: KVPool, archs: Sequence[int]) -> list[str]:
    """Names of the kernels that compile_attention compiles."""
    kind = f"{str(pool.dtype).removeprefix('torch.')} {pool.head_dim}"
    return sorted(f"{variant} {kind}" for variant in _variants(name, pool, archs))


def _variants(name: str, pool: KVPool, archs: Sequence[int]) -> set[str]:
    """FlashInfer's kinds of kernels that those backends run on GPUs of `archs`."""
    prefill, decode = _phases(name, pool)
    variants = {"fa2"} if decode == "flashinfer" else set()
    if prefill.startswith("flashinfer"):
        variants |= {variant for arch in archs for variant in prefill_variants(prefill, arch)}
    return variants


def _phases(name: str, pool: KVPool) -> tuple[str, str]:
    """Known names for prefill and decode."""
    prefill, _, decode = name.partition(",")
    decode = decode or ("flashinfer" if prefill.startswith("flashinfer") else prefill)
    return _resolve(prefill, _PREFILL, pool), _resolve(decode, _DECODE, pool)


def _resolve(name: str, known: tuple[str, ...], pool: KVPool) -> str:
    """A known name, with auto decided."""
    if name not in ("auto", *known):
        raise ConfigError(
            f"attention backend {name!r} is not known; known: auto, {', '.join(known)}"
        )
    reason = None if name == "torch" else why_not_flashinfer(pool)
    if name == "auto":
        return "flashinfer" if reason is None else "torch"
    if reason is not None:
        raise ConfigError(f"attention backend {name!r} cannot be used: {reason}")
    return name


def _one(name: str, pool: KVPool, q_heads: int) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(pool)
    if pool.device.type == "meta":
        return MetaAttention(pool, q_heads)
    major, minor = torch.cuda.get_device_capability(pool.device)
    return FlashInferAttention(pool, q_heads, prefill_variants(name, 10 * major + minor))
