"""The tensors that hold keys and values. The pool does not know which request owns a page."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.fp8 import read_kv

_SCALE_BYTES = 2  # of one key or value


class KVSpec(NamedTuple):
    """The state that one attention layer keeps for each token: a key and a value.

    kv_heads   the number of KV heads: of the whole model, or of one rank.
    head_dim   the elements of one head.
    dtype      the dtype with which attention computes, and of the stored keys and values unless
               fp8 is True.
    fp8        whether keys and values are stored as float8_e4m3fn, with one scale for each head.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fp8: bool = False

    @property
    def stored_bytes(self) -> int:
        """The bytes of the key and the value of one token in one layer, without their scales."""
        return 2 * self.kv_heads * self.head_dim * (1 if self.fp8 else self.dtype.itemsize)

    @property
    def token_bytes(self) -> int:
        """The bytes of the key and the value of one token in one layer."""
        return self.stored_bytes + (2 * self.kv_heads * _SCALE_BYTES if self.fp8 else 0)

    def of_rank(self, tp_size: int) -> "KVSpec":
        """Return the state on one of `tp_size` ranks, for a spec of the whole model.

        If the model has fewer KV heads than ranks, each rank holds a copy of one head.
        """
        return self._replace(kv_heads=max(self.kv_heads // tp_size, 1))


def kv_page_bytes(spec: KVSpec, num_layers: int, page_size: int) -> int:
    """Return the bytes of one page of `page_size` tokens: keys and values of all layers."""
    return num_layers * page_size * spec.token_bytes


class KVPool:
    """Keys and values of all layers in one allocation, zeroed once.

    spec: the state of each layer, with the KV heads of this rank.
    layers: the layers with keys and values in this pool (AttentionSpec.kv_layer). Layers with full
    attention and window layers have a pool each, because they free pages at different times.

    Pages 0..num_pages-1 are for requests. One further page, the dummy page, belongs to no request.
    Padding tokens store their keys and values there. Attention reads that page in place of key
    positions past the end of a request. A value that a former owner left in a page, such as a NaN,
    therefore never reaches another request.

    An FP8 pool has a second allocation with the scales of each page, so that a page still holds all
    that attention needs.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        layers: Sequence[int],
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.dummy_page = num_pages
        self.dummy_slot = num_pages * page_size
        self.layers = tuple(layers)
        shape = (len(layers), 2, num_pages + 1, page_size, spec.kv_heads, spec.head_dim)
        stored = torch.float8_e4m3fn if spec.fp8 else spec.dtype
        self._storage = torch.zeros(shape, dtype=stored, device=device)
        self.num_bytes = self._storage.nbytes
        parts = zip(self.layers, self._storage, strict=True)
        self._layers = {layer: (keys, values) for layer, (keys, values) in parts}
        self._scales: Tensor | None = None
        if spec.fp8:
            of_scales = (len(layers), num_pages + 1, spec.kv_heads, page_size, 2)
            self._scales = torch.ones(of_scales, dtype=torch.bfloat16, device=device)
            self.num_bytes += self._scales.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [P + 1, S, Hkv, D] and contiguous.

        layer: one of `layers`. Layers of the model may share an index.
        """
        return self._layers[layer]

    def scales(self, layer: int) -> Tensor | None:
        """View of one layer's scales, bfloat16 [P + 1, Hkv, S, 2]; None unless spec.fp8.

        The last dimension is the scale of the key and the scale of the value.
        """
        return None if self._scales is None else self._scales[self.layers.index(layer)]

    def slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Return the slots [..., n] of `positions` [..., n]. pages: [..., max_pages]."""
        size = self.page_size
        return pages.gather(-1, (positions // size).long()) * size + positions % size

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, each [..., Hkv, D] of spec.dtype. slots: integers [...]."""
        return read_kv(*self.layer(layer), slots, self.scales(layer), self.spec.dtype)

    def words(self) -> Tensor:
        """View of all keys and values, int32 [2 L, P + 1, n]: n words of a page in each slice.

        A page of these words can hold any bytes. The scales of an FP8 pool stay apart.
        """
        layers, kinds, pages = self._storage.shape[:3]
        return self._storage.view(-1).view(torch.int32).view(kinds * layers, pages, -1)

    def parts(self) -> list[Tensor]:
        """Views of all that a page holds, each [n, P + 1, m]."""
        return [self.words()] + ([] if self._scales is None else [self._scales.flatten(2)])

    def clear_dummy(self) -> None:
        """Zero the dummy page again. The steps of the warm-up write to it."""
        self._storage[:, :, self.dummy_page] = 0
        if self._scales is not None:
            self._scales[:, self.dummy_page] = 1
