"""The tensors that hold keys and values. The pool does not know which request owns a page."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVSpec(NamedTuple):
    """The state that one attention layer keeps for each token: a key and a value.

    kv_heads   the number of KV heads: of the whole model, or of one rank.
    head_dim   the elements of one head.
    dtype      the dtype of the stored keys and values.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype


def kv_page_bytes(spec: KVSpec, num_layers: int, page_size: int) -> int:
    """Return the bytes of one page of `page_size` tokens: keys and values of all layers."""
    return 2 * num_layers * page_size * spec.kv_heads * spec.head_dim * spec.dtype.itemsize


class KVPool:
    """Keys and values of all layers in one allocation, zeroed once.

    spec: the state of each layer, with the KV heads of this rank.
    num_layers: number of layers with keys and values of their own.

    Pages 0..num_pages-1 are for requests. One further page, the dummy page, belongs to no request.
    Padding tokens store their keys and values there. Attention reads that page in place of key
    positions past the end of a request. A value that a former owner left in a page, such as a NaN,
    therefore never reaches another request.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        num_layers: int,
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
        shape = (num_layers, 2, num_pages + 1, page_size, spec.kv_heads, spec.head_dim)
        self._storage = torch.zeros(shape, dtype=spec.dtype, device=device)
        self.num_bytes = self._storage.nbytes
        self._layers = [(keys, values) for keys, values in self._storage]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [P + 1, S, Hkv, D] and contiguous.

        layer: an index below num_layers (LayerSpec.kv_layer). Layers may share an index.
        """
        return self._layers[layer]

    def fill_noise(self, num_pages: int) -> None:
        """Fill the first num_pages pages with random values, so that timed steps read real data."""
        self._storage[:, :, : min(num_pages, self.num_pages)].normal_()

    def clear_dummy(self) -> None:
        """Zero the dummy page again. The steps of the warm-up write to it."""
        self._storage[:, :, self.dummy_page] = 0
