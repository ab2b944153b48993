"""Random schemas and regexes, and a run of requests that must follow them."""

import json
import math
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
import tokenizers
from llguidance import LLMatcher

from minisgl.core import EngineConfig, FinishReason, Grammar, SamplingParams, SchedulerConfig
from minisgl.distributed.comm import Communicator
from minisgl.drafts import ngram, with_head, with_ngrams
from minisgl.engine import Engine
from minisgl.message.messages import AbortReq, AddReq, LeaderStep, SchedulerStats, Shutdown
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.inbox import FollowerInbox, Inbox
from minisgl.structured import matcher
from minisgl.structured.matcher import QUICK_MASKS, SLOW_MASK_S
from minisgl.structured.processor import GrammarProcessor, with_grammars
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.scheduler.integrity import check_scheduler

_PATTERNS = ["^[a-f]{1,6}$", "^[A-Z][a-z]{0,5}$", "^[0-9]{3}-[0-9]{2}$", "^(no|yes)[.!]?$"]
_PIECES = [
    "[a-e]{1,4}",
    "(foo|ba[rz]|q+x){1,2}",
    "[0-9]{2,3}",
    "(ab?c|d){1,3}",
    " ?[x-z]",
    r"\.[0-9]",
]


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values are short."""
    leaf = ["string", "pattern", "enum", "integer", "boolean", "const", "number"]
    kind = chance.choice(leaf if depth > 2 else [*leaf, "object", "object", "array", "anyOf"])
    if depth == 0:
        kind = "object"
    match kind:
        case "object":
            names = chance.sample(["name", "zip code", "größe", "a", "items", 'quo"te'], 3)
            names = names[: chance.randint(1, 3)]
            required = [name for name in names if chance.random() < 0.7]
            properties = {name: random_schema(chance, depth + 1) for name in names}
            closed = {"additionalProperties": False, "required": required}
            return {"type": "object", "properties": properties} | closed
        case "array":
            items = random_schema(chance, depth + 1)
            return {"type": "array", "items": items, "maxItems": chance.randint(1, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
        case "enum":
            return {"enum": chance.sample(["red", "green", 3, None, "blau €", True], 3)}
        case "const":
            return {"const": chance.choice(["fixed text of some length", 17, [1, "two"]])}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(_PATTERNS)}
        case "string":
            return {"type": "string", "maxLength": chance.randint(0, 8)}
        case "integer":
            low = chance.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 900)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}
    return {"type": kind}


@dataclass(frozen=True)
class Task:
    """A grammar and the check of its answers: a schema, or a regex as a string."""

    rule: dict[str, Any] | str

    def grammar(self) -> Grammar:
        if isinstance(self.rule, str):
            return Grammar(source=LLMatcher.grammar_from_regex(self.rule), kind="regex")
        blanks = {"whitespace_pattern": r"[ \t\n]{0,2}"}
        source = LLMatcher.grammar_from_json_schema(self.rule, overrides=blanks)
        return Grammar(source=source, kind="json_schema")

    def check(self, text: str) -> None:
        if isinstance(self.rule, str):
            assert re.fullmatch(self.rule, text), f"{text!r} does not match {self.rule!r}"
        else:
            jsonschema.Draft202012Validator(self.rule).validate(json.loads(text))


def random_tasks(count: int, seed: int) -> list[Task]:
    """Return `count` tasks, a third of them regexes."""
    chance = random.Random(seed)
    tasks = []
    for index in range(count):
        pieces = chance.sample(_PIECES, chance.randint(1, 4))
        tasks.append(Task(random_schema(chance) if index % 3 else "".join(pieces)))
    return tasks


def repeated_tasks() -> list[Task]:
    """Answers that repeat themselves, so that n-grams find drafts."""
    entry = {"name": {"enum": ["one", "another"]}, "value": {"type": "integer", "maximum": 99}}
    closed = {"additionalProperties": False, "required": list(entry)}
    rows = {"type": "object", "properties": entry} | closed
    return [
        Task({"type": "array", "items": rows, "minItems": 3, "maxItems": 6}),
        Task("(ab|ba)( (ab|ba)){5,20}"),
        Task("([a-z]{2}[0-9]-){12}"),
    ]


@dataclass(frozen=True)
class Run:
    """Settings of one run.

    crowded  the KV pool is so small that requests are preempted.
    aborts   requests are aborted at random.
    free     every third request has no grammar.
    random   the checkpoint has no weights; the engine draws them.
    forced   forced tokens are appended; otherwise every token is sampled.
    drafts   steps have up to seven drafts: n-grams, or those of `drafter` in run_tasks.
    withheld half of the masks are withheld, on each rank others.
    params   sampling parameters of all requests.
    engine   further settings of the engine.
    """

    chunk: int = 8192
    cache_type: str = "radix"
    overlap: bool = True
    crowded: bool = False
    aborts: bool = False
    free: bool = False
    device: str = "cpu"
    random: bool = False
    forced: bool = True
    drafts: bool = False
    withheld: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Output tokens, end and error of each request, and the totals of the scheduler."""

    tokens: list[list[int]]
    ends: list[FinishReason]
    errors: list[str]
    totals: SchedulerStats


def prompt_of(uid: int) -> list[int]:
    """Return the prompt of a task; many prompts share a beginning."""
    length = random.Random(uid).choice([3, 20, 40])
    return [*range(5, 5 + length), 5 + uid % 90]


def run_tasks(
    comm: Communicator,
    folder: str,
    path: str,
    run: Run,
    tasks: list[Task],
    drafter: Callable[..., None] | None = None,
) -> Outcome:
    """Run one request for each task at temperature 1, on this rank.

    drafter: takes the place of kernel.find_drafts.
    """
    settings: dict[str, Any] = {
        "device": run.device,
        "dummy_weight": run.random,
        "page_size": 4,
        "num_pages": 96 if run.crowded else 4000,
        "max_running_reqs": 16,
        "max_seq_len": 512,
    }
    config = EngineConfig(model_path=path, tp_size=comm.tp.size, **settings | run.engine)
    head = config.speculative == "mtp"
    drafts = ChangingDrafts(7, head=head)
    extensions = with_grammars(path)
    if run.drafts:
        added = with_head if head else with_ngrams
        extensions = added(lambda rows: drafts, extensions)
    processor = extensions.logits_processors[-1]
    assert isinstance(processor, GrammarProcessor)
    processor.forces_tokens = run.forced
    masks = processor._masks
    masks._clock = lambda: 0.0  # no time passes, so a loaded machine withholds no mask
    if run.withheld:
        masks._group, masks._clock = 1, random.Random(comm.tp.rank).random
    engine = Engine(config, comm, extensions=extensions)
    engine.warm_up()
    facts, source, outbox = engine.facts(), LocalInbox(), deque()
    names = [endpoint(folder, f"rank-{rank}") for rank in range(1, comm.tp.size)]
    inbox: Inbox = source
    senders: list[Sender[LeaderStep]] = []
    if comm.tp.rank:
        inbox = FollowerInbox(Receiver(names[comm.tp.rank - 1], LeaderStep))
    elif names:
        senders = [Sender(name, linger_ms=60_000) for name in names]
        inbox = source = LocalInbox(senders)
    scheduler = Scheduler(
        engine,
        SchedulerConfig(
            prefill_budget_tokens=run.chunk,
            target_step_ms=None,
            cache_type=run.cache_type,
            overlap=run.overlap,
            check_plans=True,
        ),
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        inbox=inbox,
        send=outbox.append,
        extensions=extensions,
    )
    # A row whose mask was withheld pauses for one token only, so steps withhold more masks.
    quick_masks, slow_s = (2, math.inf) if run.withheld else (QUICK_MASKS, SLOW_MASK_S)
    with (
        patch.object(ngram, "find_drafts", drafter or ngram.find_drafts),
        patch.multiple(matcher, QUICK_MASKS=quick_masks, SLOW_MASK_S=slow_s),
    ):
        while comm.tp.rank and not scheduler.stopping:
            scheduler.iterate()
        if not comm.tp.rank:
            _lead(scheduler, source, run, tasks)
    for sender in senders:
        sender.close()
    engine.close()
    tokens: list[list[int]] = [[] for _ in tasks]
    ends, errors = [FinishReason.ERROR] * len(tasks), [""] * len(tasks)
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            tokens[uid].append(token)
        for finished in output.finished:
            ends[finished.uid] = finished.reason
            errors[finished.uid] = finished.error or ""
    return Outcome(tokens, ends, errors, scheduler.totals)


def _lead(scheduler: Scheduler, source: LocalInbox, run: Run, tasks: list[Task]) -> None:
    chance = random.Random(5)
    pending = deque(enumerate(tasks))
    while pending or source.messages or not scheduler.idle:
        for uid, task in [
            pending.popleft() for _ in range(min(len(pending), chance.randint(0, 4)))
        ]:
            params = {"temperature": 1.0, "max_tokens": 120, "seed": uid} | run.params
            free = run.free and uid % 3 == 0
            sampling = SamplingParams(**params, grammar=None if free else task.grammar())
            ids = np.array(prompt_of(uid), dtype="<i4").tobytes()
            source.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling))
        if run.aborts and chance.random() < 0.1:
            source.messages.append(AbortReq(uid=chance.randrange(len(tasks))))
        scheduler.iterate()
        check_scheduler(scheduler)
    source.messages.append(Shutdown())
    scheduler.iterate()


def check_answers(path: str, run: Run, tasks: list[Task], outcome: Outcome) -> int:
    """Check every answer that is complete. Return their number."""
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    complete = 0
    for uid, (task, tokens) in enumerate(zip(tasks, outcome.tokens, strict=True)):
        if outcome.ends[uid] is FinishReason.STOP and not (run.free and uid % 3 == 0):
            task.check(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
            complete += 1
    return complete
