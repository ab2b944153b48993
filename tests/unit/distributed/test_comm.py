"""The communicator between real processes, and the addresses on which it listens."""

import os
import socket
from pathlib import Path

import torch

from minisgl.distributed.comm import (
    Communicator,
    GroupCommunicator,
    SingleCommunicator,
    TPInfo,
    connect,
)
from tests.unit.distributed.ranks import run_ranks


def own_listeners() -> list[str]:
    """Addresses on which this process listens, from its own descriptors."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # listdir's own descriptor, which is closed by now
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def exercise(comm: Communicator) -> tuple[object, ...]:
    rank = comm.tp.rank
    part, ones = torch.tensor([[1.0, 5.0], [2.0, 2.0]]) * (2 * rank - 1), torch.ones(2)
    whole = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    part = part + whole / 2  # the parts of two ranks add up to `whole`
    normed, total = comm.reduce_norm(part.clone(), None, ones, 0.0)
    twice, _ = comm.reduce_norm(part, whole.clone(), ones, 0.0)
    gathered = comm.gather(torch.tensor([[rank, 10 + rank], [20 + rank, 30 + rank]]))
    smallest = comm.agree_min(7 - rank)
    scattered = torch.full((3, 2), torch.nan)
    scattered[rank::2] = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])[rank::2]
    taken = comm.take_rows(scattered, torch.tensor([2, 1, 1], dtype=torch.int32))
    norms = [normed.tolist(), twice.tolist()]
    return total.tolist(), norms, gathered.tolist(), smallest, taken.tolist(), own_listeners()


def test_a_group_replaces_each_method_of_a_single_rank() -> None:
    """An inherited collective would silently return the data of one rank."""
    methods = {name for name in vars(Communicator) if not name.startswith("_")}
    assert methods >= {"reduce_norm", "take_rows", "gather", "agree_min", "close"}
    assert methods <= vars(GroupCommunicator).keys()


def test_two_ranks_exchange_over_loopback_only(tmp_path: Path) -> None:
    """torch's TCPStore would listen on all interfaces; a file store and gloo on loopback do not."""
    for total, norms, gathered, smallest, taken, listeners in run_ranks(2, tmp_path, exercise):
        assert total == [[3.0, 4.0], [0.0, 5.0]]
        expected = torch.tensor([[0.6, 0.8], [0.0, 1.0]]) * 2**0.5
        for normed in norms:
            torch.testing.assert_close(torch.tensor(normed), expected)
        assert gathered == [[[0, 10], [20, 30]], [[1, 11], [21, 31]]]
        assert smallest == 6
        assert taken == [[4.0, 5.0], [2.0, 3.0], [2.0, 3.0]], "each row from the rank that has it"
        assert listeners, "gloo listens somewhere, otherwise this test could not fail"
        assert set(listeners) <= {"127.0.0.1", "::1"}


def test_one_rank_needs_no_file() -> None:
    before = own_listeners()
    comm = connect(TPInfo(0, 1), torch.device("cpu"), "/nowhere/at/all")
    assert isinstance(comm, SingleCommunicator)
    x = torch.ones(1, 2)
    assert comm.reduce_norm(x, None, torch.ones(2), 0.0)[1] is x
    assert comm.take_rows(x, torch.tensor([0, 0])).tolist() == [[1.0, 1.0]] * 2
    assert comm.gather(x).shape == (1, 1, 2)
    assert comm.agree_min(3) == 3
    assert own_listeners() == before
