"""The functions of the package that a plain decode step runs, from its plan to the appended ids.

All rows decode, by a graph; no edits, no drafts, no log-probabilities. The steps take new pages.
A comprehension or a lambda counts as a part of the function that contains it. The work of the graph
does not count: on a GPU the host does not run it.
"""

import sys
from collections import deque
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest

import minisgl
from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.message.messages import AddReq
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.models import build_model
from tests.unit.engine.emulated_graphs import emulate_decode_graphs

PACKAGE = str(Path(minisgl.__file__).parent)
ENGINE = 7  # of these in engine and kernel
ALL = 25
STEPS = 4  # the page size, so that one of the steps takes a page for each row


def functions_of_steps(path: str) -> set[str]:
    """Return "file:function" of each function that ran in STEPS decode steps of four requests."""
    engine = make_engine(path)
    inbox, outbox = LocalInbox(), deque()
    scheduler = Scheduler(
        engine,
        SchedulerConfig(target_step_ms=None),
        vocab_size=engine.facts().vocab_size,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    for uid in range(4):
        ids = np.arange(3, 12 + uid, dtype="<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling))
    for _ in range(6):
        scheduler.iterate()
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            codes.add(frame.f_code)

    for _ in range(STEPS):
        sys.setprofile(profile)
        scheduler.iterate()
        sys.setprofile(None)
    names = set()
    for code in codes:
        parts = code.co_qualname.split(".<locals>.")
        while parts[-1].startswith("<"):
            parts.pop()
        names.add(f"{code.co_filename.removeprefix(PACKAGE)[1:]}:{'.'.join(parts)}")
    return names


def test_a_plain_decode_step_runs_few_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_decode_graphs(monkeypatch)
    names = functions_of_steps(build_model("qwen3", tmp_path))
    listed = "\n".join(sorted(names))
    of_engine = [name for name in names if name.split("/")[0] in ("engine", "kernel")]
    print(f"{len(of_engine)} functions of the engine, {len(names)} of all\n{listed}")
    assert len(of_engine) <= ENGINE, listed
    assert len(names) <= ALL, listed
