"""Score answers to the shipped held-out prompts.

The scoring functions need neither torch nor a model, so the tests also score `LLM` and the HTTP
server with them. The command `python -m demo.evaluate` scores transformers, by default in fp32 on
the CPU. With `--llm` it scores `LLM` with the given settings, such as `--llm kv_cache_dtype=fp8`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.demo import evaluation_path, model_path

MAX_ANSWER_TOKENS = 160
_TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
# Prompt tokens that transformers processes at once.
_BATCH_TOKENS = 8192


class Prompt(NamedTuple):
    """One line of evaluation.jsonl: the request, and the right answer or the right tool calls.

    messages, tools: as in a request to an OpenAI API. calls: objects with `name` and `arguments`.
    """

    task: str
    messages: list[dict[str, Any]]
    answer: str
    tools: Sequence[dict[str, Any]] = ()
    calls: Sequence[dict[str, Any]] = ()


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


def tool_calls(text: str) -> list[Any]:
    """Parse a text that consists of tool calls; empty if the text contains anything else."""
    if _TOOL_CALL.sub("", text).strip():
        return []
    try:
        return [json.loads(call) for call in _TOOL_CALL.findall(text)]
    except json.JSONDecodeError:
        return []


def is_correct(prompt: Prompt, text: str) -> bool:
    """Whether a generated text is the right answer, apart from white space around it.

    Tool calls are right if each has the right name and equal arguments, in the right order.
    """
    if prompt.calls:
        return tool_calls(text) == list(prompt.calls)
    return text.strip() == prompt.answer


def accuracy_by_task(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, Score]:
    """Count the right answers of each task, tasks in order of appearance."""
    scores: dict[str, Score] = {}
    for prompt, text in zip(prompts, texts, strict=True):
        right, total = scores.get(prompt.task, Score(0, 0))
        scores[prompt.task] = Score(right + is_correct(prompt, text), total + 1)
    return scores


def accuracy_table(scores: dict[str, Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| task | right | of | accuracy |", "|---|---|---|---|"]
    for task, score in scores.items():
        lines.append(f"| {task} | {score.right} | {score.total} | {score.accuracy:.1%} |")
    return "\n".join(lines)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group indices of similar length, so that a batch pads little and has a bounded size."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def transformers_answers(
    prompts: Sequence[Prompt], folder: Path, device: str, dtype: str
) -> list[str]:
    """Answer the prompts greedily with transformers, in batches of prompts of similar length."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    model.eval()
    rendered = [
        tokenizer.apply_chat_template(
            prompt.messages,
            tools=list(prompt.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    texts = [""] * len(prompts)
    for batch in _batches([len(tokenizer(text).input_ids) for text in rendered]):
        inputs = tokenizer(
            [rendered[index] for index in batch],
            padding=True,
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(device)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        answers = out[:, inputs["input_ids"].shape[1] :]
        for index, text in zip(
            batch, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True
        ):
            texts[index] = text
    return texts


def llm_answers(prompts: Sequence[Prompt], settings: dict[str, Any]) -> list[str]:
    """Answer the prompts greedily with `LLM`. settings: arguments of LLM."""
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    with LLM(**settings) as llm:
        ids = [llm.tokenizer.encode_chat(p.messages, {"tools": list(p.tools)}) for p in prompts]
        answers = llm.generate(ids, greedy, progress=False)
        assert isinstance(answers, list), "a list of prompts gives a list of answers: this is a bug"
        return [answer.text for answer in answers]


def generated_prompts(per_task: int) -> list[Prompt]:
    """Generate more held-out prompts than the shipped ones, in the same way."""
    from demo.build_evaluation import evaluation_samples, line_of

    lines = (json.dumps(line_of(sample)) for sample in evaluation_samples(per_task))
    return [Prompt(**json.loads(line)) for line in lines]


def _main() -> int:
    parser = argparse.ArgumentParser(description="Score the demo model on its held-out prompts.")
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wrong", action="store_true", help="show wrong answers")
    parser.add_argument(
        "--llm",
        nargs="*",
        metavar="SETTING=VALUE",
        help="score LLM with these text settings instead of transformers",
    )
    parser.add_argument(
        "--per-task", type=int, help="generate this many prompts of each task, at least 20"
    )
    arguments = parser.parse_args()
    prompts = generated_prompts(arguments.per_task) if arguments.per_task else load_evaluation()
    started_s = time.monotonic()
    if arguments.llm is None:
        texts = transformers_answers(prompts, arguments.model, arguments.device, arguments.dtype)
    else:
        given = dict(setting.split("=", 1) for setting in arguments.llm)
        common = {"device": arguments.device, "dtype": arguments.dtype}
        texts = llm_answers(prompts, {"model": str(arguments.model), **common, **given})
    scores = accuracy_by_task(prompts, texts)
    print(accuracy_table(scores))
    print(f"{len(prompts)} prompts in {time.monotonic() - started_s:.0f} s")
    if arguments.wrong:
        for prompt, text in zip(prompts, texts, strict=True):
            if not is_correct(prompt, text):
                print(prompt.task, repr(prompt.messages[-1]["content"][-120:]))
                print("  expected", repr(prompt.answer or prompt.calls), "got", repr(text))
    return int(any(score.accuracy < 0.95 for score in scores.values()))


if __name__ == "__main__":
    raise SystemExit(_main())
