"""Code edits with and without drafts: real edits of a git repository, random weights.

The prompt of a request is a file before an edit, its output the file after it. The weights are
random, so the engine takes the tokens of the new file in place of its draws (ModelRunner.replay).
A text is cut into pieces of at most six letters, and each piece is a token.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.core import (
    Batch,
    ConfigError,
    EngineConfig,
    Int32Array,
    SamplingParams,
    SchedulerConfig,
)
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS, Engine
from minisgl.engine.model_runner import LaunchedStep
from minisgl.engine.step_launcher import StepLauncher
from minisgl.message.messages import AddReq, DraftTotals
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.process import build_scheduler
from minisgl.speculative import with_speculation

_PIECE = re.compile(r"[A-Za-z]{1,6}|[0-9]{1,3}|\s+|.", re.DOTALL)
_FEWEST, _MOST = 200, 2000  # tokens of a file


class Edit(NamedTuple):
    """A file before and after one commit, int32 ids."""

    old: Int32Array
    new: Int32Array


def edits_of(repository: Path, count: int, vocab_size: int) -> list[Edit]:
    """Return the newest `count` edits of Python files. Raises ConfigError if there are fewer."""
    ids: dict[str, int] = {}

    def tokens(text: str) -> Int32Array:
        pieces = _PIECE.findall(text)
        return np.array(
            [ids.setdefault(piece, len(ids)) % vocab_size for piece in pieces], np.int32
        )

    edits = []
    for old, new in _texts(repository):
        edit = Edit(tokens(old), tokens(new))
        if all(_FEWEST <= len(side) <= _MOST for side in edit):
            edits.append(edit)
        if len(edits) == count:
            return edits
    raise ConfigError(f"{repository} has {len(edits)} edits of Python files; {count} are needed")


def _texts(repository: Path) -> Iterator[tuple[str, str]]:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    try:
        commits = git("log", "--no-merges", "--format=%H", "--diff-filter=M", "--", "*.py").split()
        for commit in commits:
            shown = ("--name-only", "--no-renames", "--diff-filter=M", "--format=", commit)
            for name in git("show", *shown, "--", "*.py").splitlines():
                yield git("show", f"{commit}~:{name}"), git("show", f"{commit}:{name}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"git cannot read the edits of {repository}: {error}") from None


class ReplayEngine(Engine):
    """An engine that samples the tokens of the new file. edits: those of all requests."""

    edits: Sequence[Edit] = ()

    def _assemble(self) -> StepLauncher:
        launcher = super()._assemble()
        replay = torch.full_like(launcher.runner.token_pool, -1)
        launcher.runner = replace(launcher.runner, replay=replay)
        return launcher

    def launch(self, batch: Batch) -> LaunchedStep:
        for row, tokens, _ in batch.histories:
            edit = next(edit for edit in self.edits if np.array_equal(edit.old, tokens))
            replay = self._launcher.runner.replay
            assert replay is not None, "the runner must have a replay; this is a bug"
            with self._on_stream():
                output = torch.from_numpy(edit.new).to(replay.device)
                replay[row, len(tokens) : len(tokens) + len(output)] = output
        return super().launch(batch)


def run(scheduler: Scheduler, inbox: LocalInbox, edits: Sequence[Edit], concurrency: int) -> float:
    """Run all edits, `concurrency` of them at the same time. Returns output tokens per second."""
    waiting = [
        AddReq(
            uid=uid,
            token_ids=edit.old.astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=len(edit.new), ignore_eos=True, seed=uid),
        )
        for uid, edit in enumerate(edits)
    ]
    outputs = sum(len(edit.new) for edit in edits)
    begin_s = time.perf_counter()
    while waiting or not scheduler.idle:
        stats = scheduler.stats()
        room = concurrency - stats.running_reqs - stats.waiting_reqs
        for _ in range(min(room, len(waiting))):
            inbox.messages.append(waiting.pop(0))
        scheduler.iterate()
    return outputs / (time.perf_counter() - begin_s)


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench drafts", description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help=f"{', '.join(SHAPES)} (qwen3-8b)")
    parser.add_argument(
        "--repository", type=Path, default=Path(), help="git repository with the edits (.)"
    )
    parser.add_argument("--edits", type=positive_int, default=20, help="number of edits (20)")
    parser.add_argument(
        "--concurrency", type=positive_int, nargs="+", default=[1, 16], help="requests at once"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, model = load_shape(options.model, Path(folder))
        edits = edits_of(options.repository, options.edits, model.vocab_size)
        rates: dict[str, list[float]] = {}
        totals = DraftTotals()
        for method in (None, "ngram"):
            config = EngineConfig(
                model_path=path,
                device=options.device,
                dummy_weight=options.model in SHAPES,
                max_running_reqs=max(options.concurrency),
                max_seq_len=2 * _MOST,
                speculative=method,
            )
            extensions = with_speculation(method, DEFAULT_EXTENSIONS)
            engine = ReplayEngine(config, SingleCommunicator(), extensions=extensions)
            engine.edits, inbox = edits, LocalInbox()
            # Without a prefix cache, every run computes all prompts.
            policy = SchedulerConfig(cache_type="naive")
            scheduler = build_scheduler(engine, policy, inbox, lambda output: None)
            rates[method or "none"] = [
                run(scheduler, inbox, edits, reqs) for reqs in options.concurrency
            ]
            totals = scheduler.totals.drafts
            engine.close()
    drafted, accepted = sum(totals.drafted), sum(totals.accepted)
    print(f"{options.model}, {len(edits)} edits, {accepted} of {drafted} draft tokens accepted")
    print(f"{'requests':<10} {'tokens/s':>10} {'with drafts':>12} {'ratio':>7}")
    for reqs, plain, faster in zip(options.concurrency, *rates.values(), strict=True):
        print(f"{reqs:<10} {plain:>10,.0f} {faster:>12,.0f} {faster / plain:>7.2f}")
    summary = {"model": options.model, "edits": len(edits), "requests": options.concurrency}
    print(json.dumps({**summary, "rates": rates, "drafted": drafted, "accepted": accepted}))
    return 0
