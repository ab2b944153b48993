"""The demo model's answers on the GPU, and errors for logits that are not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.evaluate import MAX_ANSWER_TOKENS, accuracy_by_task, accuracy_table, load_evaluation
from minisgl.benchmark.models import write_model
from minisgl.core import FinishReason, SamplingParams
from minisgl.llm import LLM, Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LEAST_ACCURACY = 0.95
VOCAB, POISON = 1511, 777
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}


def completed(answers: Completion | list[Completion]) -> list[Completion]:
    assert isinstance(answers, list)
    return answers


@pytest.mark.slow
def test_the_demo_model_answers_as_on_the_cpu() -> None:
    """bfloat16 with FlashInfer equals float32 on the CPU, which equals transformers.

    So does bfloat16 with an FP8 KV cache.
    """
    prompts = load_evaluation()
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    scores = {}
    kinds: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu"},
        "cuda": {"device": "cuda", "attention_backend": "flashinfer-fa2"},
        "fp8": {"device": "cuda", "kv_cache_dtype": "fp8"},
    }
    for kind, settings in kinds.items():
        with LLM(prefill_budget_tokens=512, **settings) as llm:
            ids = [llm.tokenizer.encode_chat(p.messages, {"tools": list(p.tools)}) for p in prompts]
            answers = completed(llm.generate(ids, greedy, progress=False))
        scores[kind] = accuracy_by_task(prompts, [answer.text for answer in answers])
        print(f"{kind}\n{accuracy_table(scores[kind])}")
    for task, exact in scores["cpu"].items():
        assert exact.accuracy >= LEAST_ACCURACY
        for kind in ("cuda", "fp8"):
            assert abs(scores[kind][task].right - exact.right) <= 0.02 * exact.total


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nonfinite_logits_end_only_their_request(kv: str, tmp_path: Path) -> None:
    """The embedding of one token is NaN.

    A request with this token in its prompt gets an error, each other request gets all its tokens.
    No KV page of a broken prompt is reused, in chunks, graphs and mixed steps.
    """
    path = Path(write_model("qwen3-0.6b", tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | SMALL))
    stem = torch.randint(3, POISON, (70,)).tolist()
    clean = [torch.randint(3, POISON, (length,)).tolist() for length in (5, 40, 100, 17)]
    broken = [[*stem, POISON], [*stem, POISON, 5, 6], [POISON]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"device": "cuda", "dummy_weight": True, "prefill_budget_tokens": 48}
    with LLM(str(path), max_running_reqs=8, kv_cache_dtype=kv, **options) as llm:
        model = llm.worker._engine._launcher.runner.model
        model.model.embed_tokens.weight.data[POISON] = torch.nan
        model.lm_head.weight.data[POISON] = 0  # no request draws this token: the best logit is > 0
        for _ in range(2):
            both = completed(llm.generate([*clean, *broken], greedy, progress=False))
            for answer in both[: len(clean)]:
                assert answer.finish_reason is FinishReason.LENGTH
                assert len(answer.token_ids) == 20
            for answer in both[len(clean) :]:
                assert answer.finish_reason is FinishReason.ERROR
                assert answer.token_ids == []
                assert "non-finite" in str(answer.error)
        totals = llm.worker.scheduler.totals
        assert totals.nonfinite_rows_total == 2 * len(broken)
        cached = totals.cached_tokens_total
        llm.generate([[*stem, 5]], greedy, progress=False)
        assert totals.cached_tokens_total == cached
