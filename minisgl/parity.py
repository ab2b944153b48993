"""`minisgl check MODEL`: compares a model's answers with those of transformers.

The model answers 20 prompts greedily: without the prefix cache, from the cache, and with drafts.
transformers then computes its distribution at each answer token, after the same tokens before it.
Both run on one device, one after the other.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from torch import Tensor

from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import TPInfo
from minisgl.engine import resolve_device
from minisgl.llm import LLM
from minisgl.llm.results import Completion
from minisgl.llm.workers import LocalWorker
from minisgl.settings.command_line import ArgumentParser
from minisgl.settings.resolve import resolve
from minisgl.utils import setup_logging

_ANSWER_TOKENS = 32
_TOP = 20  # the most likely tokens that a completion reports
_LEAST_AGREEMENT = 0.95
_LEAST_SAME = 0.5  # of the answers in 16-bit types, where rounding changes some of them
_MOST_KL = 0.02  # mean over the positions, nats; bfloat16 stays below it
_PROMPTS = (
    "What is the capital of France, and on which river does it lie?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Translate into German: The train to the airport leaves in ten minutes from platform four.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Show the steps.",
    "List the planets of the solar system in the order of their distance from the sun.",
    "Write a haiku about rain in a city at night.",
    "Résumez en une phrase l'histoire du Petit Chaperon rouge.",
    "What does this SQL query return? SELECT name, COUNT(*) FROM orders GROUP BY name;",
    "Continue the sequence and explain it: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31,",
    "用一句话解释什么是光合作用。",
    "Give a JSON object with the keys name, age and city for a person that you make up.",
    "Which of these words is a verb: table, run, green, quickly, under? Answer with one word.",
    "Rewrite this sentence in the passive voice: The committee approved the new budget on Monday.",
    "Was ist der Unterschied zwischen Wetter und Klima? Antworte in zwei kurzen Sätzen.",
    "Write a regular expression that matches dates such as 2024-05-17, and name its parts.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Name three differences between a list and a tuple in Python.",
    "If all roses are flowers and some flowers fade quickly, do all roses fade quickly? Explain.",
    "Copy this table as CSV: | a | b | c | then | 1 | 2 | 3 | then | 4 | 5 | 6 | then | 7 | 8 |",
)


class Answers(NamedTuple):
    """The answers of one run. cached: prompt tokens from the prefix cache. drafts: accepted."""

    completions: list[Completion]
    cached: int
    drafts: int

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.completions]


class Comparison(NamedTuple):
    """The comparison with transformers at one answer token.

    same  transformers ranks the token first.
    kl    divergence of minisgl from transformers in nats, over minisgl's most likely tokens and all
          other tokens together. It is at most that over the whole vocabulary.
    gap   by how much transformers' first token is more likely than this one, in nats.
    """

    same: bool
    kl: float
    gap: float


def main(argv: Sequence[str]) -> int:
    """Print the results. Returns 1 if one of them is outside of its bound. Raises ConfigError."""
    setup_logging("check", "warning")
    parser = ArgumentParser(
        prog="minisgl check",
        usage="minisgl check [MODEL] [--json] [FLAGS]",
        description="Answer 20 prompts with a model, and compare the answers with those of "
        "transformers on the same device, with those from the prefix cache, and with those with "
        "drafts. The exit code is 1 if they differ by more than rounding.",
        epilog="Takes all flags of minisgl, such as --dtype, --device and --kv-cache-dtype.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options, flags = parser.parse_known_args(argv)
    config = resolve(flags, os.environ, command=(parser.prog, "--json"))
    if config.engine.tp_size > 1 or config.engine.dummy_weight:
        raise ConfigError("check needs one GPU or the CPU, and the weights of the model")
    dtype, prompts, miss, hit, drafted = _minisgl_answers(config.engine)
    device = resolve_device(config.engine, TPInfo(0, 1))
    found = list(_compare(config.engine.model_path, device, dtype, prompts, miss.completions))
    name, report = config.served_names[0], report_of(dtype, prompts, miss, hit, drafted, found)
    if options.json:
        sys.stdout.write(
            json.dumps({"model": name, "device": device.type, "dtype": dtype, **report}) + "\n"
        )
    else:
        sys.stdout.write(_as_text(f"{name} on {device.type} in {dtype}", report))
    return 0 if report["passed"] else 1


def _minisgl_answers(
    config: EngineConfig,
) -> tuple[str, list[list[int]], Answers, Answers, Answers]:
    """Return dtype, ids of the prompts, and the answers of a miss, of a hit, and with drafts."""
    settings = msgspec.structs.asdict(config)
    path, _ = settings.pop("model_path"), settings.pop("tp_size")
    settings["speculative"] = None
    with LLM(path, **settings) as llm:
        prompts = [_encoded(llm, text) for text in _PROMPTS]
        miss, hit = _answers(llm, prompts), _answers(llm, prompts)
        dtype = llm.facts.dtype
    with LLM(path, **settings | {"speculative": "ngram"}) as drafting:
        return dtype, prompts, miss, hit, _answers(drafting, prompts, miss.tokens)


def _encoded(llm: LLM, text: str) -> list[int]:
    if llm.tokenizer.info.chat_template is None:
        return llm.tokenizer.encode_text(text)
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def _answers(
    llm: LLM, prompts: list[list[int]], predicted: list[list[int]] | None = None
) -> Answers:
    done = llm.generate(
        prompts,
        progress=False,
        prediction=predicted,
        temperature=0.0,
        max_tokens=_ANSWER_TOKENS,
        ignore_eos=True,
        logprobs=None if predicted else _TOP,
    )
    assert isinstance(done, list), "a list of prompts has a list of answers; this is a bug"
    assert isinstance(llm.worker, LocalWorker), "the LLM has one rank; this is a bug"
    if errors := [answer.error for answer in done if answer.error is not None]:
        raise ConfigError(f"the model does not answer: {errors[0]}")
    accepted = sum(llm.worker.scheduler.totals.drafts.accepted)
    return Answers(done, sum(answer.cached_tokens for answer in done), accepted)


def _compare(
    folder: str,
    device: torch.device,
    dtype: str,
    prompts: list[list[int]],
    answers: list[Completion],
) -> Iterator[Comparison]:
    """Yield the comparison with transformers at each answer token. Raises ConfigError."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (ImportError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"transformers cannot load the model: {first_line}") from None
    model = model.to(device)  # in the mode for inference, as from_pretrained returns it
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.token_ids[:-1]], device=device)
        with torch.inference_mode():
            logits: Tensor = model(ids).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits.double().log_softmax(-1).cpu(), answer.logprobs, strict=True):
            tops = torch.tensor([top.token_id for top in token.top])
            ours = torch.tensor([top.logprob for top in token.top], dtype=torch.double).exp()
            theirs = row[tops].exp()
            kl = _kl(_with_rest(theirs), _with_rest(ours))
            gap = float(row.max() - row[token.token_id])
            yield Comparison(gap == 0, kl, gap)


def _with_rest(probabilities: Tensor) -> Tensor:
    """Append the probability of all other tokens together."""
    return torch.cat([probabilities, (1 - probabilities.sum()).clamp(min=1e-12)[None]])


def _kl(first: Tensor, second: Tensor) -> float:
    return float((first * (first.clamp(min=1e-30) / second.clamp(min=1e-30)).log()).sum())


def report_of(
    dtype: str,
    prompts: list[list[int]],
    miss: Answers,
    hit: Answers,
    drafted: Answers,
    found: list[Comparison],
) -> dict[str, Any]:
    """Return the results, and in `passed` whether all are inside of their bounds.

    dtype: of both models.
    """
    same = [_equal(miss, hit), _equal(miss, drafted)]
    # In 16-bit types, a product of another number of rows may round otherwise.
    least_same = len(prompts) * (1.0 if dtype == "float32" else _LEAST_SAME)
    agreement = sum(each.same for each in found) / len(found)
    kl_mean = sum(each.kl for each in found) / len(found)
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": len(found),
        "agreement": agreement,
        "largest_gap": max(each.gap for each in found),
        "kl_mean": kl_mean,
        "kl_max": max(each.kl for each in found),
        "cached_tokens": [miss.cached, hit.cached],
        "same_from_cache": same[0],
        "same_with_drafts": same[1],
        "accepted_drafts": drafted.drafts,
        "passed": min(same) >= least_same
        and hit.cached > miss.cached
        and agreement >= _LEAST_AGREEMENT
        and kl_mean <= _MOST_KL,
    }


def _equal(first: Answers, second: Answers) -> int:
    return sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))


def _as_text(title: str, report: dict[str, Any]) -> str:
    cached, of = report["cached_tokens"], report["prompt_tokens"]
    return (
        f"{title}: {report['prompts']} prompts, {report['tokens']} answer tokens\n"
        f"transformers  {report['agreement']:.1%} of the tokens agree (at least "
        f"{_LEAST_AGREEMENT:.0%}); the largest difference of a log-probability is "
        f"{report['largest_gap']:.3f}\n"
        f"KL            mean {report['kl_mean']:.1e} nats (at most {_MOST_KL:g}), largest "
        f"{report['kl_max']:.1e}\n"
        f"prefix cache  {cached[0]} of {of} prompt tokens hit in the first run, {cached[1]} in the "
        f"second; {report['same_from_cache']} of {report['prompts']} answers are the same\n"
        f"drafts        {report['accepted_drafts']} of {report['tokens']} tokens were accepted "
        f"drafts; {report['same_with_drafts']} of {report['prompts']} answers are the same\n"
        f"{'passed' if report['passed'] else 'FAILED'}\n"
    )
