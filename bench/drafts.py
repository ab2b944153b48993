"""Code edits with and without drafts: real edits of this repository's files, random weights.

A request asks for a file after an edit. The file before the edit is in the prompt, and it is the
request's prediction. The weights are random, so the engine takes the tokens of the new file in
place of its draws (ReplayTokens).

code_edits.jsonl has 20 edits, each of another file and another commit: the newest ones of 10 to 60
changed lines in files of 150 to 230 lines. A line of it has the commit, the path, the old file, and
the changes: first line, end line and new text. A text is cut into tokens like those of a tokenizer
with a large vocabulary: up to seven letters with the space before them, up to three digits, up to
two other signs, or white space. A token has 3.2 characters on average.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from bench.pinned import PinnedAcceptance
from bench.replaced_draws import ReplacedDraws
from minisgl.benchmark.flag_types import pinned_lengths, positive_int
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.outbox import raise_failure
from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.core.batch import Int32Array
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.drafts import with_speculation
from minisgl.engine import (
    DEFAULT_EXTENSIONS,
    Engine,
    Extensions,
    ModelRunner,
    Stage,
    StepColumns,
    StepTensors,
    resolve_device,
)
from minisgl.message.messages import AddReq, StepOutput
from minisgl.message.stats import DraftTotals
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.process import build_scheduler
from minisgl.utils.startup import Progress

EDITS = Path(__file__).with_name("code_edits.jsonl")
_PIECE = re.compile(r" ?[A-Za-z]{1,7}|[0-9]{1,3}|[^\sA-Za-z0-9]{1,2}|\s+(?= )|\s+")
_NO_DRAFTS = "none"  # the label of the run without drafts
_FIRST_TOKENS = 32  # of the file in a prompt without the whole file


class Edit(NamedTuple):
    """A request, int32 ids. prediction: the output that its client expects, or nothing."""

    prompt: Int32Array
    output: Int32Array
    prediction: Int32Array


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of code_edits.jsonl. changes: (first line, end line, new text), in rising order."""

    commit: str
    path: str
    old: str
    changes: list[tuple[int, int, str]]


def edits_of(source: Path, count: int, vocab_size: int, whole_prompts: bool = True) -> list[Edit]:
    """Return the first `count` edits of a file like code_edits.jsonl.

    whole_prompts: the prompt is the whole old file, and not only its first tokens.
    """
    ids: dict[str, int] = {}

    def tokens(text: str) -> Int32Array:
        pieces = _PIECE.findall(text)
        numbers = [ids.setdefault(piece, len(ids)) % vocab_size for piece in pieces]
        return np.array(numbers, dtype=np.int32)

    edits = []
    for raw in source.read_bytes().splitlines()[:count]:
        line = msgspec.json.decode(raw, type=_Line)
        lines = line.old.splitlines(keepends=True)
        for first, end, text in reversed(line.changes):
            lines[first:end] = [text]
        old, new = tokens(line.old), tokens("".join(lines))
        edits.append(Edit(old if whole_prompts else old[:_FIRST_TOKENS], new, old))
    return edits


def pages_for(edits: Sequence[Edit], concurrency: int, page_size: int) -> int:
    """Return the KV pages of the `concurrency` longest requests together."""
    pages = sorted(-(-(len(edit.prompt) + len(edit.output)) // page_size) for edit in edits)
    return sum(pages[-concurrency:])


class ReplayTokens(ReplacedDraws, Stage):
    """Lets an engine sample the tokens of the new file: a stage and the Finish of all steps.

    edits: those of all requests.
    """

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def added_to(self, extensions: Extensions) -> Extensions:
        """Return the extensions with this stage and this finish."""
        stages = (*extensions.stages, self._stage)
        return replace(extensions, stages=stages, finish=self.finish_of)

    def before(self, x: StepTensors) -> None:
        for row, tokens, _ in x.batch.histories:
            edit = next(edit for edit in self._edits if np.array_equal(edit.prompt, tokens))
            output = torch.from_numpy(edit.output).to(self._replay.device)
            self._replay[row, len(tokens) : len(tokens) + len(output)] = output

    def replaced(self, columns: StepColumns, drawn: Tensor) -> Tensor:
        views = columns.token_views()
        given = self._replay[views.rows.long(), (views.start + views.lengths).long()]
        return torch.where(given >= 0, given, drawn)

    def _stage(self, runner: ModelRunner) -> Stage:
        # A number that is not negative takes the place of the token at this row and position.
        self._replay = torch.full_like(runner.token_pool, -1)
        return self


def run(
    scheduler: Scheduler,
    inbox: LocalInbox,
    outbox: Sequence[StepOutput],
    edits: Sequence[Edit],
    concurrency: int,
    title: str,
) -> float:
    """Run all edits, `concurrency` of them at the same time. Returns output tokens per second.

    outbox: the list to which the scheduler adds its outputs. title: of the progress bar on stderr.
    Raises ConfigError when a request fails.
    """
    waiting = [
        AddReq(
            uid=uid,
            token_ids=edit.prompt.astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=len(edit.output), ignore_eos=True, seed=uid),
            prediction=edit.prediction.astype("<i4").tobytes(),
        )
        for uid, edit in enumerate(edits)
    ]
    outputs = sum(len(edit.output) for edit in edits)
    with Progress(total=outputs, unit="tok", desc=title) as bar:
        begin_s = time.perf_counter()
        while waiting or not scheduler.idle:
            stats = scheduler.stats()
            room = concurrency - stats.running_reqs - stats.waiting_reqs
            for _ in range(min(room, len(waiting))):
                inbox.messages.append(waiting.pop(0))
            read = len(outbox)
            scheduler.iterate()
            for output in outbox[read:]:
                raise_failure(output)
                bar.update(len(output.uids))
        return outputs / (time.perf_counter() - begin_s)


def _runs(
    acceptance: dict[int, float] | None, edits: Sequence[Edit]
) -> Iterator[tuple[str, str | None, Callable[[Extensions], Extensions]]]:
    """Yield the label of each run, its method, and the function that adds its drafts."""
    replay = ReplayTokens(edits).added_to
    yield _NO_DRAFTS, None, replay
    if acceptance is None:
        yield "ngram", "ngram", lambda added: replay(with_speculation("ngram", added))
    for drafts, tokens in (acceptance or {}).items():
        label = f"mtp {drafts}, pinned {tokens:.2f}"
        yield label, "mtp", PinnedAcceptance(drafts, tokens).added_to


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench drafts", description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help=f"{', '.join(SHAPES)} (qwen3-8b)")
    parser.add_argument("--edits", type=positive_int, default=20, help="number of edits (20)")
    parser.add_argument(
        "--short-prompts",
        action="store_true",
        help=f"prompts with the first {_FIRST_TOKENS} tokens of a file; predictions have all of it",
    )
    parser.add_argument(
        "--concurrency", type=positive_int, nargs="+", default=[1, 16], help="requests at once"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--acceptance",
        type=pinned_lengths,
        metavar="DRAFTS:TOKENS,...",
        help="run the draft head of the model with 1 or 3 drafts in each step, and let each step "
        "give a request this many tokens in the mean, such as 1:1.93,3:3.39. Without it, drafts "
        "are those of repetitions",
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, model = load_shape(options.model, Path(folder))
        edits = edits_of(EDITS, options.edits, model.vocab_size, not options.short_prompts)
        rates: dict[str, list[float]] = {}
        chosen = EngineConfig(model_path=path, device=options.device)
        # A GPU gives the KV pool all memory that is left. On a CPU the default of the pool may be
        # too small for one edit.
        num_pages: int | None = None
        if resolve_device(chosen, TPInfo(0, 1)).type == "cpu":
            num_pages = pages_for(edits, max(options.concurrency), chosen.page_size)
        totals, outbox = DraftTotals(), list[StepOutput]()
        for label, method, added in _runs(options.acceptance, edits):
            config = EngineConfig(
                model_path=path,
                device=options.device,
                dummy_weight=options.model in SHAPES,
                num_pages=num_pages,
                max_running_reqs=max(options.concurrency),
                max_seq_len=max(len(edit.prompt) + len(edit.output) for edit in edits),
                speculative=method,
            )
            sys.stderr.write(f"{label}: loading {options.model}\n")
            extensions = added(DEFAULT_EXTENSIONS)
            engine = Engine(config, SingleCommunicator(), extensions=extensions)
            inbox = LocalInbox()
            # Without a prefix cache, every run computes all prompts.
            policy = SchedulerConfig(cache_type="naive")
            scheduler = build_scheduler(engine, policy, inbox, outbox.append)
            rates[label] = []
            for reqs in options.concurrency:
                title = f"{label}, {reqs} at once"
                rate = run(scheduler, inbox, outbox, edits, reqs, title)
                rates[label].append(rate)
                print(f"{title}: {rate:,.0f} tokens/s", flush=True)
            totals = scheduler.totals.drafts
            engine.close()
    tokens = sum(len(edit.output) for edit in edits) * len(options.concurrency)
    drafted, accepted = sum(totals.drafted), sum(totals.accepted)
    predicted = sum(count for output in outbox for _, count in output.predicted)
    print(f"{options.model}, {len(edits)} edits, {accepted} of {drafted} draft tokens accepted")
    print(f"{predicted} of {tokens} output tokens equal a draft from the prediction")
    print(f"{'drafts':<24} {'requests':>8} {'tokens/s':>10} {'ms/token':>9} {'ratio':>7}")
    for label, of_label in rates.items():
        for reqs, plain, rate in zip(options.concurrency, rates[_NO_DRAFTS], of_label, strict=True):
            each_ms = 1e3 * reqs / rate
            print(f"{label:<24} {reqs:>8} {rate:>10,.0f} {each_ms:>9.2f} {rate / plain:>7.2f}")
    counts = {"tokens": tokens, "drafted": drafted, "accepted": accepted, "predicted": predicted}
    summary = {"model": options.model, "edits": len(edits), "requests": options.concurrency}
    print(json.dumps({**summary, "rates": rates, **counts}))
    return 0
