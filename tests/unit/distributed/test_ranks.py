"""A failure on one rank ends the whole run, and the message has the stack of each rank."""

import os
import threading
from pathlib import Path

import pytest

from minisgl.distributed.comm import Communicator
from tests.unit.distributed.ranks import run_ranks


def end_or_wait(comm: Communicator, raises: bool) -> None:
    if comm.tp.rank:
        wait_for_ever()
    if raises:
        raise ValueError("rank 0 has a defect")
    os._exit(3)


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (False, r"rank 0 \(exit status 3\): ended without a result"),
        (True, r"(?s)rank 0 \(exit status 0\): .*ValueError: rank 0 has a defect"),
    ],
)
def test_a_failed_rank_ends_the_run_with_the_stacks_of_the_others(
    raises: bool, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=reason) as caught:
        run_ranks(2, tmp_path, end_or_wait, raises)
    assert "in wait_for_ever" in str(caught.value)
