"""The linears of a layer with 4-bit weights, with the widths of Qwen3-8B."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl.kernel.packed_order import OrderedWeights, in_order
from minisgl.kernel.packed_products import packed_linear
from minisgl.kernel.packed_weights import PackedKind, PackedWeights

_HIDDEN, _HEADS, _INNER = 4096, 6144, 12288
_GROUPS = {PackedKind.INT4: 128, PackedKind.NVFP4: 16}
_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)

Make = Callable[[], Callable[[], object]]


def packed_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. bytes_moved: of the weights and their headers."""
    for kind in PackedKind:
        headers = 1 if kind is PackedKind.INT4 else 4  # of 128 columns, with 4 bytes each
        weights = _HIDDEN * (_HEADS + _HIDDEN + 3 * _INNER)
        for rows in _ROWS:
            moved = weights // 2 + weights // 128 * 4 * headers
            yield f"{kind} layer of Qwen3-8B, {rows} rows", moved, _maker(kind, rows)


def _maker(kind: PackedKind, rows: int) -> Make:
    def make() -> Callable[[], object]:
        qkv, o, gate_up, down = (
            _weights(kind, height, width)
            for height, width in (
                (_HEADS, _HIDDEN),
                (_HIDDEN, _HIDDEN),
                (2 * _INNER, _HIDDEN),
                (_HIDDEN, _INNER),
            )
        )
        semaphores = torch.zeros(_INNER, dtype=torch.int32, device="cuda")
        x = torch.randn(rows, _HIDDEN, dtype=torch.bfloat16, device="cuda")

        def call() -> Tensor:
            heads = packed_linear(x, qkv, None, semaphores)[:, :_HIDDEN]
            hidden = packed_linear(heads, o, None, semaphores)
            inner = packed_linear(hidden, gate_up, None, semaphores, gated=True)
            return packed_linear(inner, down, None, semaphores)

        return call

    return make


def _weights(kind: PackedKind, height: int, width: int) -> OrderedWeights:
    codes = torch.randint(0, 256, (height, width // 2), dtype=torch.uint8, device="cuda")
    scales = torch.full((height, width // _GROUPS[kind]), 2.0**-8, device="cuda")
    if kind is PackedKind.INT4:
        return in_order(PackedWeights(kind, 128, codes, scales.bfloat16()))
    rows = torch.ones(height, device="cuda")
    return in_order(PackedWeights(kind, 16, codes, scales.to(torch.float8_e4m3fn), None, rows))
