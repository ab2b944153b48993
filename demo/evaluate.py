"""Score answers to the shipped held-out prompts.

The scoring functions need neither torch nor a model, so the tests also score `LLM` and the HTTP
server with them. The command `python -m demo.evaluate` scores transformers, by default in fp32 on
the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from minisgl.demo import evaluation_path, model_path

MAX_ANSWER_TOKENS = 96


class Prompt(NamedTuple):
    """One line of evaluation.jsonl."""

    task: str
    messages: list[dict[str, str]]
    answer: str


class Score(NamedTuple):
    """The number of right answers to the prompts of a task."""

    right: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.right / self.total


def load_evaluation(path: Path | None = None) -> list[Prompt]:
    """Read the held-out prompts in file order."""
    lines = (path or evaluation_path()).read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def is_correct(answer: str, text: str) -> bool:
    """Whether a generated text is the right answer, apart from white space around it."""
    return text.strip() == answer


def accuracy_by_task(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, Score]:
    """Count the right answers of each task, tasks in order of appearance."""
    scores: dict[str, Score] = {}
    for prompt, text in zip(prompts, texts, strict=True):
        right, total = scores.get(prompt.task, Score(0, 0))
        scores[prompt.task] = Score(right + is_correct(prompt.answer, text), total + 1)
    return scores


def accuracy_table(scores: dict[str, Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| task | right | of | accuracy |", "|---|---|---|---|"]
    for task, score in scores.items():
        lines.append(f"| {task} | {score.right} | {score.total} | {score.accuracy:.1%} |")
    return "\n".join(lines)


def transformers_answers(
    prompts: Iterable[Prompt], folder: Path, device: str, dtype: str
) -> list[str]:
    """Answer each prompt greedily with transformers, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    model.eval()
    texts: list[str] = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            prompt.messages, tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(device)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        answer_ids = out[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(answer_ids, skip_special_tokens=True))
    return texts


def _main() -> int:
    parser = argparse.ArgumentParser(description="Score the demo model on its held-out prompts.")
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wrong", action="store_true", help="show wrong answers")
    arguments = parser.parse_args()
    prompts = load_evaluation()
    started_s = time.monotonic()
    texts = transformers_answers(prompts, arguments.model, arguments.device, arguments.dtype)
    scores = accuracy_by_task(prompts, texts)
    print(accuracy_table(scores))
    print(f"{len(prompts)} prompts in {time.monotonic() - started_s:.0f} s")
    if arguments.wrong:
        for prompt, text in zip(prompts, texts, strict=True):
            if not is_correct(prompt.answer, text):
                print(prompt.task, repr(prompt.messages[-1]["content"][-120:]))
                print("  expected", repr(prompt.answer), "got", repr(text))
    return int(any(score.accuracy < 0.95 for score in scores.values()))


if __name__ == "__main__":
    raise SystemExit(_main())
