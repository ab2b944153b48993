"""Shape and dtype decide whether peer memory computes a sum, so that all ranks agree."""

import pytest
import torch

from minisgl.distributed.peers import PeerMemory
from minisgl.kernel.peers import PeerLayout

MIB = 2**20


def rows(count: int, width: int = 5120, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(count, width, dtype=dtype, device="meta")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_peer_memory_computes_sums_of_up_to_80_mib_with_rows_of_whole_16_bytes(size: int) -> None:
    peers = PeerMemory(0, size, torch.device("meta"))
    assert all(peers.can_sum(rows(count)) for count in (1, 7, 256, 8192))
    assert not peers.can_sum(rows(8193)), (
        "rows are padded to a multiple of the ranks, which exceeds the memory"
    )
    assert not peers.can_sum(rows(8192, dtype=torch.float32))
    assert not peers.can_sum(rows(0))
    assert not peers.can_sum(rows(4, width=1001))


def test_parts_of_peer_memory_do_not_overlap() -> None:
    layout = PeerLayout(slot_bytes=64 * MIB, row_bytes=32 * MIB)
    assert layout.flags_offset == 160 * MIB
    assert layout.size(4) == 160 * MIB + 2 * 128 * 4 * 4
