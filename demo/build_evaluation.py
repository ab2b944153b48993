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


def _lookups(lexicon: Lexicon, encoder: Encoder) -> list[Sample]:
    draw = Draw(random.Random(f"evaluation lookup {SEED}"), lexicon, held_out=True)
    documents = [long_document(draw, encoder, tokens, 1) for tokens in LOOKUP_TOKENS]
    return held_out_samples(SEED, "lookup", PROMPTS_PER_TASK - len(documents), lexicon) + documents


def evaluation_samples() -> Iterator[Sample]:
    """Return all prompts: 50 per task, some with a system message or with turns before them."""
    lexicon, encoder = Lexicon(), Encoder(load_tokenizer())
    for task in GENERATORS:
        if task == "lookup":
            yield from _lookups(lexicon, encoder)
            continue
        rng = random.Random(f"evaluation {SEED} {task}")
        if task in TOOL_TASKS:
            for sample in held_out_samples(SEED, task, PROMPTS_PER_TASK, lexicon):
                yield with_system(rng, sample)
            continue
        samples = held_out_samples(SEED, task, PROMPTS_PER_TASK + _MULTI_TURN_PER_TASK, lexicon)
        merged = [
            joined([samples[i], samples[PROMPTS_PER_TASK + i]]) for i in range(_MULTI_TURN_PER_TASK)
        ]
        for sample in merged + samples[_MULTI_TURN_PER_TASK:PROMPTS_PER_TASK]:
            yield with_system(rng, sample)


def _line(sample: Sample) -> dict[str, object]:
    line: dict[str, object] = {"task": sample.task, "messages": sample.messages()}
    line["answer"] = sample.answer
    if sample.tools:
        line["tools"] = sample.schemas()
    if sample.calls:
        line["calls"] = [call._asdict() for call in sample.calls]
    return line


def evaluation_text() -> str:
    """Return the content of evaluation.jsonl."""
    return "".join(f"{json.dumps(_line(sample))}\n" for sample in evaluation_samples())


if __name__ == "__main__":
    evaluation_path().write_text(evaluation_text(), encoding="utf-8")
    print(f"{evaluation_path().stat().st_size} bytes")
