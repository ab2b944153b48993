"""The ranks of an LLM, with other programs in their place."""

import os
import signal
import subprocess

import pytest

from minisgl.core import WorkerDied
from minisgl.llm.workers import RankWorkers
from minisgl.utils import supervise


def test_an_llm_names_the_killed_rank_even_if_its_peer_is_reaped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: on a slow machine the error named rank 0, which had lost the killed rank."""
    monkeypatch.setattr(supervise, "_KILLED_EXIT_S", 60.0)  # the killed process ends before
    workers = RankWorkers.__new__(RankWorkers)
    workers._reasons, reason_fd = os.pipe2(os.O_NONBLOCK)
    supervise.write_reason(reason_fd, "scheduler", "lost its peer")
    commands = {"scheduler": ["false"], "scheduler-1": ["sleep", "600"]}
    workers.children = [
        supervise.Child(role, subprocess.Popen(command)) for role, command in commands.items()
    ]
    first, other = workers.children
    assert first.process.wait() == 1
    os.kill(other.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"scheduler-1 .* was killed by SIGKILL"):
        raise workers._cause(first)
    os.close(workers._reasons)
    os.close(reason_fd)
