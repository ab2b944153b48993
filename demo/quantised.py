"""Score the demo model with and without quantisation, on fresh held-out prompts.

`python -m demo.quantised --quantization fp8` prints the right answers of both for each task. The
engine answers, so a GPU runs the kernels of the server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from demo.evaluate import MAX_ANSWER_TOKENS, Prompt, Score, accuracy_by_task
from demo.generate import held_out_samples
from demo.lexicon import Lexicon
from demo.tasks import GENERATORS
from minisgl.core import SamplingParams
from minisgl.llm import LLM

SEED = 2027  # not that of the shipped prompts


def fresh_prompts(per_task: int) -> list[Prompt]:
    """Return `per_task` held-out prompts of each task."""
    lexicon = Lexicon()
    return [
        Prompt(
            sample.task,
            sample.messages(),
            sample.answer,
            tuple(sample.schemas() if sample.tools else ()),
            tuple(call._asdict() for call in sample.calls),
        )
        for task in GENERATORS
        for sample in held_out_samples(SEED, task, per_task, lexicon)
    ]


def engine_scores(prompts: Sequence[Prompt], **settings: object) -> dict[str, Score]:
    """Answer the prompts greedily. settings: as for LLM."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    with LLM(**settings) as llm:  # type: ignore[arg-type]
        ids = [llm.tokenizer.encode_chat(p.messages, {"tools": list(p.tools)}) for p in prompts]
        completions = llm.generate(ids, greedy, progress=False)
    return accuracy_by_task(prompts, [completion.text for completion in completions])


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--per-task", type=int, default=500)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    prompts, began_s = fresh_prompts(arguments.per_task), time.monotonic()
    plain = engine_scores(prompts, device=arguments.device)
    other = engine_scores(prompts, device=arguments.device, quantization=arguments.quantization)
    print(f"| task | prompts | as stored | {arguments.quantization} |\n|---|---|---|---|")
    for task, score in plain.items():
        print(f"| {task} | {score.total} | {score.accuracy:.1%} | {other[task].accuracy:.1%} |")
    print(f"{2 * len(prompts)} answers in {time.monotonic() - began_s:.0f} s")
    return int(any(other[task].accuracy < plain[task].accuracy - 0.01 for task in plain))


if __name__ == "__main__":
    raise SystemExit(_main())
