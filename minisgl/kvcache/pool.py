"""The tensors that hold keys and values. Which page belongs to whom is not known here."""

import torch
from torch import Tensor


def kv_page_bytes(
    num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one page over all layers, keys and values together, on one rank."""
    return 2 * num_layers * page_size * kv_heads * head_dim * dtype.itemsize


class KVPool:
    """Keys and values of all layers in one allocation, zeroed once. kv_heads: of this rank.

    Pages 0..num_pages-1 are for requests. One more page, the dummy, stays unowned: padded queries
    and key positions past a request's end point there, so that what a former owner left behind
    (a NaN, say) can never reach another request.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.dummy_page = num_pages
        self.dummy_slot = num_pages * page_size
        shape = (num_layers, 2, num_pages + 1, page_size, kv_heads, head_dim)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.num_bytes = self._storage.nbytes
        self._layers: list[tuple[Tensor, Tensor]] = [
            (self._storage[layer, 0], self._storage[layer, 1]) for layer in range(num_layers)
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [P + 1, S, Hkv, D] and contiguous."""
        return self._layers[layer]

    def fill_noise(self, num_pages: int) -> None:
        """Let the first pages hold what differs, as keys and values do: for steps to be timed."""
        self._storage[:, :, : min(num_pages, self.num_pages)].normal_()

    def clear_dummy(self) -> None:
        """Zero the dummy page again, after steps that wrote to it on purpose."""
        self._storage[:, :, self.dummy_page] = 0
