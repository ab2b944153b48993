"""Published weights in bf16 and FP8, beside the same rounding in transformers' model.

`pytest -m proof -s tests/proof/test_published_rounding.py` prints the figures of
bench/notebook/2026-11-27-quality.md: of each model with rounding, the mean KL divergence from
transformers' float32 model, and how often its most likely token is the same.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from minisgl.tokenizer.tokenizer import TextTokenizer
from tests.parity.driver import Driver, Work, logprobs_of, make_engine
from tests.proof.published import MODELS, Published, model_folder, prompt_ids, prompts

pytestmark = pytest.mark.proof

LARGEST = 448.0  # of e4m3
MOST_RATIO = 1.2
CHUNK = 256
BLOCK = 64  # positions compared at a time: 64 x 262,144 doubles are 134 MB
ROUNDED_KV = "sdpa_fp8_kv"


class Rounding(NamedTuple):
    """settings: of minisgl's engine. The other fields are of transformers' model."""

    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    weights: bool = False
    kv: bool = False


ROUNDINGS = {
    "bf16": Rounding({"dtype": "bfloat16"}, dtype=torch.bfloat16),
    "FP8 weights": Rounding({"quantization": "fp8"}, weights=True),
    "FP8 KV": Rounding({"kv_cache_dtype": "fp8"}, kv=True),
    "FP8 weights and KV": Rounding(
        {"quantization": "fp8", "kv_cache_dtype": "fp8"}, weights=True, kv=True
    ),
}


class Change(NamedTuple):
    """Of each position: kl in nats, and whether the most likely token is the same."""

    kl: Tensor
    same: Tensor


def to_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    return (x / scales).to(torch.float8_e4m3fn).to(x.dtype) * scales


def largest(x: Tensor) -> Tensor:
    """The largest absolute value of each row of the last dimension, which becomes 1."""
    return x.abs().amax(-1, keepdim=True)


def rounded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> Any:
    """Attention with keys and values [batch, heads, tokens, D] as an FP8 KV cache stores them.

    The scale of a token's key or value in a head is a power of two.
    """
    key, value = (to_e4m3(x, (largest(x) / LARGEST).log2().ceil().exp2()) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, *others, **options)


def load(folder: Path, rounding: Rounding) -> Any:
    """Return transformers' model with the rounding."""
    AttentionInterface.register(ROUNDED_KV, rounded_attention)
    AttentionMaskInterface.register(ROUNDED_KV, sdpa_mask)
    attention = ROUNDED_KV if rounding.kv else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=rounding.dtype, attn_implementation=attention
    )
    for name, module in model.named_modules():
        if rounding.weights and name.endswith("_proj"):
            weight = module.weight.data
            weight.copy_(to_e4m3(weight, largest(weight) / LARGEST))
    return model.eval()


class Runner:
    """minisgl's engine. A spy keeps the logits of all positions of a prompt."""

    def __init__(self, folder: Path, longest: int, settings: dict[str, Any]) -> None:
        self.engine = make_engine(
            str(folder),
            page_size=16,
            num_pages=longest // 16 + 2,
            max_seq_len=longest + 1,
            **settings,
        )
        self.driver = Driver(self.engine)
        head = self.engine._launcher.runner.model.lm_head
        self.compute, self.seen = head.logits, list[Tensor]()
        head.logits = self._spy  # type: ignore[method-assign]

    def _spy(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.seen.append(self.compute(hidden, out))
        return self.seen[-1]

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), V]"""
        self.seen.clear()
        for start in range(0, len(ids), CHUNK):
            work = Work(0, start, ids[start : start + CHUNK], samples=False)
            self.driver.step(work, logprobs=logprobs_of(work, prompts=True))
        return torch.cat(self.seen)


def change(exact: Tensor, rounded: Tensor) -> Change:
    """exact, rounded: logits [T, V]."""
    kl = []
    for first, second in zip(exact.split(BLOCK), rounded.split(BLOCK), strict=True):
        logs = [part.double().log_softmax(-1) for part in (first, second)]
        kl.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    return Change(torch.cat(kl), exact.argmax(-1) == rounded.argmax(-1))


def changes(folder: Path, rounding: Rounding) -> Iterator[tuple[Change, Change]]:
    """Yield the change of minisgl's model and that of transformers' model, of each prompt."""
    tokenizer = TextTokenizer(folder)
    texts = [prompt_ids(tokenizer, row) for row in prompts()]
    runner = Runner(folder, max(map(len, texts)), rounding.settings)
    models = load(folder, Rounding({})), load(folder, rounding)
    for ids in texts:
        with torch.inference_mode():
            exact, theirs = (model(torch.tensor([ids])).logits[0] for model in models)
        yield change(exact, runner.logits(ids)), change(exact, theirs)


@pytest.mark.parametrize("published", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_fp8_changes_the_distributions_as_in_transformers(name: str, published: Published) -> None:
    found = list(zip(*changes(model_folder(published), ROUNDINGS[name]), strict=True))
    kl, same = (
        [torch.cat([getattr(part, field) for part in side]).double().mean() for side in found]
        for field in Change._fields
    )
    positions = sum(len(part.kl) for part in found[0])
    print(
        f"\n{published.name}, {name}, {positions} positions: mean KL {kl[0]:.3e}, transformers "
        f"{kl[1]:.3e}, ratio {kl[0] / kl[1]:.3f}; top-1 {same[0]:.2%}, transformers {same[1]:.2%}"
    )
    # bfloat16 rounds every result. The two models round different intermediate results.
    assert ROUNDINGS[name].dtype == torch.bfloat16 or kl[0] <= MOST_RATIO * kl[1]
