"""Code edits with and without drafts: real edits of this repository's files, random weights.

A request asks for a file after an edit. The file before the edit is in the prompt, and it is the
request's prediction. The weights are random, so the engine takes the tokens of the new file in
place of its draws (ReplayTokens).

With --lengths, the requests are random prompts, and their outputs have no prediction. The column
ms/token is the median over requests of the mean time between two tokens of an answer.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.edits import EDITS, FIRST_TOKENS, Edit, edits_of, pages_for, random_edits
from bench.failures import raise_failure
from bench.pinned import PinnedAcceptance
from bench.replaced_draws import ReplacedDraws
from minisgl.benchmark.flag_types import add_model_flags, pinned_lengths, positive_int
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.text_table import TextTable
from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.drafts import with_speculation
from minisgl.engine import (
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
from minisgl.quantization import with_quantizations
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.process import build_scheduler
from minisgl.utils.startup import Progress

_NO_DRAFTS = "none"  # the label of the run without drafts


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


class Speed(NamedTuple):
    """tokens_per_s: of all requests. token_s: the median over requests of the mean seconds between
    two tokens of the output, from the first token on."""

    tokens_per_s: float
    token_s: float


def run(
    scheduler: Scheduler,
    inbox: LocalInbox,
    outbox: Sequence[StepOutput],
    edits: Sequence[Edit],
    concurrency: int,
    title: str,
) -> Speed:
    """Run all edits, `concurrency` of them at the same time.

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
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    with Progress(total=outputs, unit="tok", desc=title) as bar:
        begin_s = time.perf_counter()
        while waiting or not scheduler.idle:
            stats = scheduler.stats()
            room = concurrency - stats.running_reqs - stats.waiting_reqs
            for _ in range(min(room, len(waiting))):
                inbox.messages.append(waiting.pop(0))
            read = len(outbox)
            scheduler.iterate()
            now_s = time.perf_counter()
            for output in outbox[read:]:
                raise_failure(output)
                bar.update(len(output.uids))
                last_s |= dict.fromkeys(output.uids, now_s)
                first_s = dict.fromkeys(output.uids, now_s) | first_s
        passed_s = time.perf_counter() - begin_s
    spans = [
        (last_s[uid] - first_s[uid]) / max(len(edit.output) - 1, 1)
        for uid, edit in enumerate(edits)
    ]
    return Speed(outputs / passed_s, statistics.median(spans))


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
    add_model_flags(parser, "qwen3-8b", "--device", "--quantization")
    parser.add_argument("--edits", type=positive_int, default=20, help="number of requests (20)")
    parser.add_argument(
        "--lengths",
        type=positive_int,
        nargs=2,
        metavar=("PROMPT", "OUTPUT"),
        help="random prompts and outputs of this many tokens, in place of the edits",
    )
    parser.add_argument(
        "--short-prompts",
        action="store_true",
        help=f"prompts with the first {FIRST_TOKENS} tokens of a file; predictions have all of it",
    )
    parser.add_argument(
        "--concurrency", type=positive_int, nargs="+", default=[1, 16], help="requests at once"
    )
    parser.add_argument(
        "--acceptance",
        type=pinned_lengths,
        metavar="DRAFTS:TOKENS,...",
        help="run the draft head of the model with 1 or 3 drafts in each step, and let each step "
        "give a request this many tokens in the mean, such as 1:1.93,3:3.39. Without it, drafts "
        "are those of repetitions",
    )
    parser.add_argument(
        "--target-step-ms",
        type=float,
        metavar="MS",
        default=SchedulerConfig().target_step_ms,
        help="as in the server; 0: no limit for steps with prompts (%(default)s)",
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, model = load_shape(options.model, Path(folder))
        if options.lengths is None:
            edits = edits_of(EDITS, options.edits, model.vocab_size, not options.short_prompts)
        else:
            edits = random_edits(options.edits, tuple(options.lengths), model.vocab_size)
        speeds: dict[str, list[Speed]] = {}
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
                quantization=options.quantization,
            )
            sys.stderr.write(f"{label}: loading {options.model}\n")
            extensions = added(with_quantizations())
            engine = Engine(config, SingleCommunicator(), extensions=extensions)
            inbox = LocalInbox()
            # Without a prefix cache, every run computes all prompts.
            target_ms = options.target_step_ms or None
            policy = SchedulerConfig(cache_type="naive", target_step_ms=target_ms)
            scheduler = build_scheduler(engine, policy, inbox, outbox.append)
            speeds[label] = []
            for reqs in options.concurrency:
                title = f"{label}, {reqs} at once"
                speed = run(scheduler, inbox, outbox, edits, reqs, title)
                speeds[label].append(speed)
                print(f"{title}: {speed.tokens_per_s:,.0f} tokens/s", flush=True)
            totals = scheduler.totals.drafts
            engine.close()
    tokens = sum(len(edit.output) for edit in edits) * len(options.concurrency)
    drafted, accepted = sum(totals.drafted), sum(totals.accepted)
    predicted = sum(count for output in outbox for _, count in output.predicted)
    print(f"{options.model}, {len(edits)} edits, {accepted} of {drafted} draft tokens accepted")
    print(f"{predicted} of {tokens} output tokens equal a draft from the prediction")
    columns = {"requests": ">8", "tokens/s": ">10,.0f", "ms/token": ">9.2f", "ratio": ">7.2f"}
    table = TextTable({"drafts": "<24"} | columns)
    print(table.head)
    for label, of_label in speeds.items():
        for reqs, plain, speed in zip(
            options.concurrency, speeds[_NO_DRAFTS], of_label, strict=True
        ):
            ratio = speed.tokens_per_s / plain.tokens_per_s
            print(table.row(label, reqs, speed.tokens_per_s, 1e3 * speed.token_s, ratio))
    counts = {"tokens": tokens, "drafted": drafted, "accepted": accepted, "predicted": predicted}
    summary = {"model": options.model, "edits": len(edits), "requests": options.concurrency}
    summary |= {"quantization": options.quantization, "lengths": options.lengths}
    summary |= {"target_step_ms": options.target_step_ms}
    rates = {label: [speed._asdict() for speed in found] for label, found in speeds.items()}
    print(json.dumps({**summary, "rates": rates, **counts}))
    return 0
