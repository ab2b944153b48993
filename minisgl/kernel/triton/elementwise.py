"""Activation, embedding look-up, and sinks. Each reads and writes an element once."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_BLOCK = 1024
_ELEMENTS = 2048  # elements of an attention output that a program scales


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """The input of the last product, by the name of an Activation. RELU2 does not read `gate`."""
    if ACTIVATION == "relu2":
        up = tl.maximum(up, 0.0)
        value = up * up
    elif ACTIVATION == "silu":
        value = gate / (1.0 + tl.exp(-gate)) * up
    else:  # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z, with 2 * sqrt(2 / pi) = 1.5957691
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        value = gate / (1.0 + tl.exp(-z)) * up
    return value


@triton.jit
def _activate(
    x,
    out,
    width,
    x_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x + row * x_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(x + row * x_stride + width + cols, mask=mask).to(tl.float32)
    value = activated(gate, up, ACTIVATION)
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=mask)


_activation_launcher = Launcher(_activate, current_device)


@triton.jit
def _multiply_sigmoid(
    x, gate, width, x_stride, gate_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    opens = tl.load(gate + row * gate_stride + cols, mask=mask).to(tl.float32)
    at = x + row * x_stride + cols
    value = tl.load(at, mask=mask).to(tl.float32) / (1.0 + tl.exp(-opens))
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


_sigmoid_launcher = Launcher(_multiply_sigmoid, current_device)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _gather(ids, weight, images, out, first_id, num_ids, width, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    local = token - first_id
    is_local = (local >= 0) & (local < num_ids)
    inside = cols < width
    value = tl.load(weight + local * width + cols, mask=inside & is_local, other=0.0)
    if images is not None:
        is_image = token < 0
        feature = tl.load(images - (token + 1) * stride + cols, mask=inside & is_image, other=0.0)
        value = tl.where(is_image, feature, value)
    tl.store(out + row * width + cols, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_sinks(
    out,
    lse,
    sinks,
    rows,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    sink = tl.load(sinks + row % HEADS).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp2(sink * LOG2_E - tl.load(lse + row, mask=inside, other=0.0)))
    at = out + row[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    value = tl.load(at, mask=inside[:, None]).to(tl.float32) * share[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=inside[:, None])


def silu_and_mul(x: Tensor) -> Tensor:
    """As the reference, but rounded only at the end. x: [..., 2I]. Returns a new [..., I]."""
    return _activated(x, Activation.SILU)


def gelu_and_mul(x: Tensor) -> Tensor:
    """As silu_and_mul."""
    return _activated(x, Activation.GELU)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    """activation: one with a gate."""
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    if out.numel():
        grid = (-(-width // _BLOCK) * rows.shape[0],)
        sizes, name = (width, rows.stride(0)), activation.value
        constants = partial(_block_constants, ACTIVATION=name)
        _activation_launcher(grid, (rows, out), sizes, (), (name,), constants)
    return out


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """As the reference, but rounded only at the end. x, gate: [T, n], unit stride in n."""
    num_rows, width = x.shape
    if num_rows:
        grid = (triton.cdiv(width, _BLOCK) * num_rows,)
        sizes = width, x.stride(0), gate.stride(0)
        _sigmoid_launcher(grid, (x, gate), sizes, (), (), _block_constants)
    return x


def _block_constants(**values: object) -> Constants:
    overlap = overlaps()
    values = {**values, "BLOCK": _BLOCK, "OVERLAP": overlap}
    return Constants(values, {"num_warps": 4, "launch_pdl": overlap})


def gather_embedding(
    ids: Tensor, weight: Tensor, first_id: int, images: Tensor | None = None
) -> Tensor:
    """As the reference. ids: integers [T]; weight: contiguous [rows, H]. Returns a new [T, H]."""
    num_ids, width = weight.shape
    out = weight.new_empty((len(ids), width))
    if out.numel():
        grid = (triton.cdiv(width, _BLOCK) * len(ids),)
        sizes = first_id, num_ids, width, 0 if images is None else images.stride(0)
        _gather[grid](ids, weight, images, out, *sizes, BLOCK=_BLOCK, num_warps=4)
    return out


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """As the reference. All tensors are contiguous; D is a power of two."""
    tokens, heads, dim = out.shape
    if tokens:
        rows = max(_ELEMENTS // dim, 1)
        grid = (triton.cdiv(tokens * heads, rows),)
        constants = {"HEADS": heads, "D": dim, "ROWS": rows, "LOG2_E": math.log2(math.e)}
        _add_sinks[grid](out, lse, sinks, tokens * heads, **constants)
