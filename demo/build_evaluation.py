"""Write the shipped held-out prompts: `python -m demo.build_evaluation`.

The prompts come from the generators with `held_out=True`: the training contains none of the items
that they ask about. The same seed gives the same file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from demo.batches import long_document
from demo.generate import held_out_samples, joined, with_system
from demo.lexicon import Lexicon
from demo.sample import Draw, Sample
from demo.tasks import GENERATORS, TOOL_TASKS
from demo.vocabulary import Encoder, load_tokenizer
from minisgl.demo import evaluation_path

SEED = 2026
PROMPTS_PER_TASK = 50
MAX_LOOKUP_TOKENS = 3000
# Target lengths of the long lookup prompts in tokens, chat template included.
LOOKUP_TOKENS = (500, 1000, 1500, 2000, 2500, *(2985,) * 15)
_MULTI_TURN_PER_TASK = 4


def _lookups(lexicon: Lexicon, encoder: Encoder, per_task: int) -> list[Sample]:
    draw = Draw(random.Random(f"evaluation lookup {SEED}"), lexicon, held_out=True)
    documents = [long_document(draw, encoder, tokens, 1) for tokens in LOOKUP_TOKENS]
    count = max(per_task - len(documents), 0)
    return held_out_samples(SEED, "lookup", count, lexicon) + documents


def evaluation_samples(per_task: int = PROMPTS_PER_TASK) -> Iterator[Sample]:
    """Yield `per_task` prompts of each task, at least 20.

    Some have a system message or turns before them.
    """
    lexicon, encoder = Lexicon(), Encoder(load_tokenizer())
    for task in GENERATORS:
        if task == "lookup":
            yield from _lookups(lexicon, encoder, per_task)
            continue
        rng = random.Random(f"evaluation {SEED} {task}")
        if task in TOOL_TASKS:
            for sample in held_out_samples(SEED, task, per_task, lexicon):
                yield with_system(rng, sample)
            continue
        samples = held_out_samples(SEED, task, per_task + _MULTI_TURN_PER_TASK, lexicon)
        merged = [joined([samples[i], samples[per_task + i]]) for i in range(_MULTI_TURN_PER_TASK)]
        for sample in merged + samples[_MULTI_TURN_PER_TASK:per_task]:
            yield with_system(rng, sample)


def line_of(sample: Sample) -> dict[str, object]:
    """Return the fields of demo.evaluate.Prompt."""
    line: dict[str, object] = {"task": sample.task, "messages": sample.messages()}
    line["answer"] = sample.answer
    if sample.tools:
        line["tools"] = sample.schemas()
    if sample.calls:
        line["calls"] = [call._asdict() for call in sample.calls]
    return line


def evaluation_text() -> str:
    """Return the content of evaluation.jsonl."""
    return "".join(f"{json.dumps(line_of(sample))}\n" for sample in evaluation_samples())


if __name__ == "__main__":
    evaluation_path().write_text(evaluation_text(), encoding="utf-8")
    print(f"{evaluation_path().stat().st_size} bytes")
