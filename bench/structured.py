"""Outputs that follow a JSON schema, compared with free outputs of the same engine.

The weights are random and the temperature is 1, so that the model prefers no schema. The benchmark
makes three comparisons:

1. Inter-token latency (ITL) of many streams: free, with a token mask in every step, and with masks
   and forced tokens. The ITL is the time between two steps that give a stream tokens.
2. Time to first token (TTFT) of single requests, free and with a schema that is new to the server.
   The TTFT with a schema includes the check of the schema, as in a tokenizer worker.
3. Tokens per second of one stream whose schema forces at least a third of the text, with and
   without forced tokens.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.failures import raise_failure
from minisgl.benchmark.flag_types import add_model_flags, positive_int
from minisgl.benchmark.models import SHAPES, write_model
from minisgl.benchmark.text_table import TextTable
from minisgl.core import Grammar, GrammarFailed, SamplingParams
from minisgl.llm import LLM
from minisgl.llm.workers import LocalWorker
from minisgl.message.messages import AddReq, CompileGrammar
from minisgl.structured.processor import GrammarProcessor
from minisgl.structured.service import GrammarService
from minisgl.utils.startup import Progress

_PROMPT_TOKENS = 64
_WHITESPACE = r"[ \t\n]{0,8}"  # as in a server without --max-json-whitespace
_FIELDS = {
    "identifier": {"type": "string", "pattern": "^[a-f0-9]{8}$"},
    "description": {"type": "string", "minLength": 20, "maxLength": 200},
    "category_of_item": {"enum": ["hardware", "software", "documentation", "service"]},
    "number_of_units": {"type": "integer", "minimum": 0, "maximum": 10**6},
    "available_for_order": {"type": "boolean"},
}


class Times(NamedTuple):
    """Times of some requests that ran together.

    ttft_s    seconds to the first token, one for each request.
    gaps_s    seconds between two steps that gave a request tokens, over all requests.
    tokens_s  output tokens per second, over all requests.
    """

    ttft_s: list[float]
    gaps_s: list[float]
    tokens_s: float


def records(fields: Iterable[str], rows: int) -> dict[str, Any]:
    """Return the schema of an array of `rows` records with these fields of _FIELDS."""
    properties = {name: _FIELDS[name] for name in fields}
    record = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "array", "items": record | {"additionalProperties": False}, "minItems": rows}


def new_schema(index: int) -> dict[str, Any]:
    """Return a schema that no other index has, with 12 to 30 properties on two levels."""
    inner = {f"field_{index}_{i}": _FIELDS[name] for i, name in enumerate([*_FIELDS] * 2)}
    nested = {"type": "object", "properties": inner, "additionalProperties": False}
    outer = {f"part_{index}_{i}": nested for i in range(1 + index % 3)}
    return {"type": "object", "properties": outer, "required": [*outer]}


class Checked(NamedTuple):
    """A schema after its check: the grammar, or None if it was refused, and the seconds."""

    grammar: Grammar | None
    seconds: float


def check(service: GrammarService, schema: dict[str, Any]) -> Checked:
    """Check and compile a schema as the process for grammars does."""
    began_s = time.perf_counter()
    request = CompileGrammar(
        kind="json_schema", text=json.dumps(schema), whitespace_pattern=_WHITESPACE
    )
    result = service.compile(request)
    seconds = time.perf_counter() - began_s
    if (checked := result.grammar) is None:
        return Checked(None, seconds)
    # A grammar without compile_s compiles in a thread, as all grammars of the recorded runs do.
    return Checked(Grammar(source=checked.source, kind=checked.kind), seconds)


class Bench:
    """An LLM whose scheduler gets requests directly, so that only engine and scheduler count."""

    def __init__(self, llm: LLM) -> None:
        assert isinstance(llm.worker, LocalWorker), "the benchmark runs one rank; this is a bug"
        self._worker = llm.worker
        self._vocab_size = llm.facts.vocab_size
        processors = llm.worker.extensions.logits_processors
        self._grammars = next(p for p in processors if isinstance(p, GrammarProcessor))
        self._uid = 0
        self.totals = self._grammars.totals

    def run(
        self,
        grammars: Sequence[Grammar | None],
        tokens: int,
        forced: bool = False,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> Times:
        """Run one request for each grammar, all together. None: a free request.

        on_tokens: called with the number of tokens of each output, to show progress. Raises
        ConfigError when a request fails, except by its grammar: `totals` count these.
        """
        self._grammars.forces_tokens = forced
        messages = [self._message(grammar, tokens) for grammar in grammars]
        began_s = time.perf_counter()
        for message in messages:
            self._worker.send(message)
        last_s: dict[int, float] = {}
        ttft_s: list[float] = []
        gaps_s: list[float] = []
        count, open_reqs = 0, {message.uid for message in messages}
        while open_reqs:
            for output in self._worker.step():
                now_s = time.perf_counter()
                raise_failure(output, counted=(GrammarFailed.__name__,))
                count += len(output.uids)
                for uid in dict.fromkeys(output.uids):
                    if uid in last_s:
                        gaps_s.append(now_s - last_s[uid])
                    else:
                        ttft_s.append(now_s - began_s)
                    last_s[uid] = now_s
                open_reqs -= {finished.uid for finished in output.finished}
                on_tokens(len(output.uids))
        return Times(ttft_s, gaps_s, count / (time.perf_counter() - began_s))

    def _message(self, grammar: Grammar | None, tokens: int) -> AddReq:
        self._uid += 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=self._uid, grammar=grammar)
        prompt = np.random.default_rng(self._uid).integers(0, self._vocab_size, _PROMPT_TOKENS)
        return AddReq(uid=self._uid, token_ids=prompt.astype("<i4").tobytes(), sampling=params)


Row = tuple[str, float, float]  # name, milliseconds, ratio to the row that it is compared with


def itl_rows(
    bench: Bench, grammar: Grammar | None, streams: Sequence[int], tokens: int
) -> Iterator[Row]:
    """Rows of comparison 1, with this grammar for every stream."""
    with Progress(total=3 * tokens * sum(streams), desc="streams", unit="tok") as bar:

        def gap_ms(grammars: Sequence[Grammar | None], forced: bool = False) -> float:
            return float(np.median(bench.run(grammars, tokens, forced, bar.update).gaps_s)) * 1e3

        for count in streams:
            free = gap_ms([None] * count)
            yield f"ITL p50, {count} streams, free", free, 1.0
            for name, forced in (("masks", False), ("masks and forced tokens", True)):
                found = gap_ms([grammar] * count, forced)
                yield f"ITL p50, {count} streams, {name}", found, found / free


def ttft_rows(
    bench: Bench, service: GrammarService, schemas: Sequence[dict[str, Any]]
) -> Iterator[Row]:
    """Rows of comparison 2, over the schemas that the server accepts."""
    free, checks, new = [], [], []
    for schema in Progress(schemas, desc="schemas"):
        grammar, seconds = check(service, schema)
        if grammar is not None:
            free += bench.run([None], 2).ttft_s
            times_s = [seconds + ttft_s for ttft_s in bench.run([grammar], 2).ttft_s]
            checks += [seconds] * len(times_s)
            new += times_s
    percentiles = (50, 99)
    at = [np.percentile(times_s, percentiles) * 1e3 for times_s in (free, checks, new)]
    yield f"TTFT p50, free, {len(new)} of {len(schemas)} schemas", float(at[0][0]), 1.0
    for percent, without, alone, whole in zip(percentiles, *at, strict=True):
        yield f"check of a new schema, p{percent}", float(alone), float(alone / without)
        added = float(whole - without)
        yield f"TTFT p{percent}, added by a new schema", added, float(whole / without)


def forced_rows(bench: Bench, grammar: Grammar | None, tokens: int) -> Iterator[Row]:
    """Rows of comparison 3: milliseconds per token of one stream with this grammar."""
    with Progress(total=2 * tokens, desc="one stream", unit="tok") as bar:
        sampled = 1e3 / bench.run([grammar], tokens, on_tokens=bar.update).tokens_s
        before = bench.totals.forced_tokens
        forced = 1e3 / bench.run([grammar], tokens, True, bar.update).tokens_s
    share = (bench.totals.forced_tokens - before) / tokens
    yield "time per token, 1 stream, every token sampled", sampled, 1.0
    yield f"time per token, 1 stream, {share:.0%} forced", forced, forced / sampled


def all_rows(
    bench: Bench,
    service: GrammarService,
    schemas: Sequence[dict[str, Any]],
    streams: Sequence[int],
    tokens: int,
) -> Iterator[Row]:
    """The rows of all comparisons, each as soon as it is measured."""
    bench.run([None, check(service, records(_FIELDS, rows=2)).grammar], 8, forced=True)
    yield from itl_rows(bench, check(service, records(_FIELDS, 1000)).grammar, streams, tokens)
    yield from ttft_rows(bench, service, schemas)
    fields = ("category_of_item", "number_of_units", "available_for_order")
    yield from forced_rows(bench, check(service, records(fields, 1000)).grammar, tokens)
    totals = bench.totals
    yield "time of one mask", 1e3 * totals.mask_seconds / max(totals.masks, 1), 1.0


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench structured", description=__doc__)
    add_model_flags(parser, "qwen3-8b", "--device")
    parser.add_argument(
        "--streams", type=positive_int, nargs="+", default=[64, 256], help="streams (64 256)"
    )
    parser.add_argument(
        "--tokens", type=positive_int, default=256, help="tokens of each stream (256)"
    )
    parser.add_argument("--schemas", type=positive_int, default=500, help="new schemas (500)")
    parser.add_argument(
        "--schema-folder", type=Path, help="take the new schemas from the *.json files of a folder"
    )
    options = parser.parse_args(argv)
    if options.schema_folder is None:
        schemas = [new_schema(index) for index in range(options.schemas)]
    else:
        files = sorted(options.schema_folder.rglob("*.json"))[: options.schemas]
        schemas = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    sys.stderr.write(f"loading {options.model}\n")
    with tempfile.TemporaryDirectory() as folder:
        random_weights = options.model in SHAPES
        path = options.model
        if random_weights:
            path = write_model(options.model, Path(folder), full_vocabulary=True)
        # The service forks, so it starts before the threads of the engine.
        service = GrammarService(path, (-1, -1))
        llm = LLM(
            path,
            dummy_weight=random_weights,
            device=options.device,
            max_running_reqs=max(options.streams),
            cache_type="naive",
        )
    table = TextTable({"": "<48", "ms": ">9.3f", "ratio": ">7.3f"})
    print(options.model, table.head, sep="\n")
    rows = []
    with llm, contextlib.closing(service):
        bench = Bench(llm)
        for row in all_rows(bench, service, schemas, options.streams, options.tokens):
            print(table.row(*row), flush=True)
            rows.append(row)
    failures = bench.totals.failures
    print(json.dumps({"model": options.model, "rows": rows, "failures": failures}))
    return 0
