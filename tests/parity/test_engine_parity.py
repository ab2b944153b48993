"""Engine.launch gives the logits and greedy tokens of transformers, for any split into steps."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import PLAIN, AttentionRule, AttentionStep, StepAttention
from minisgl.attention.decode import BalancedDecode
from minisgl.attention.torch import TorchAttention
from minisgl.core import SamplingParams
from minisgl.kernel.decode import decode_scratch
from minisgl.kvcache.pool import KVPool
from tests.parity.driver import GREEDY, Driver, Work, make_engine
from tests.parity.models import FAMILIES, VOCAB_SIZE, transformers_greedy, transformers_logits

ModelPath = Callable[[str], str]
NUM_TOKENS = 8
KV = pytest.mark.parametrize("kv", ["auto", "fp8"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


@KV
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt_gives_the_same_tokens(family: str, kv: str, model_path: ModelPath) -> None:
    path = model_path(family)
    prompt = prompt_of(41)
    driver = Driver(make_engine(path, kv_cache_dtype=kv))
    tokens = driver.generate(0, prompt, NUM_TOKENS)
    assert tokens == transformers_greedy(path, prompt, NUM_TOKENS, kv, guess=tokens)


class FusedAlone(BalancedDecode):
    """Decode that the model may call only with the output of the qkv projection."""

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        raise AssertionError("the model norms and rotates by itself")


class FusedDecode(TorchAttention):
    """Runs decode as FlashInferAttention does, with the reference of the decode kernel."""

    name = "fused"

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        super().__init__(pool, q_heads, rule)
        self._q_heads = q_heads

    def prepare(self, step: AttentionStep) -> StepAttention:
        if not step.num_decode:
            return super().prepare(step)
        spec, reqs = self._pool.spec, len(step.start)
        sizes = reqs, self._q_heads, spec.kv_heads, spec.head_dim
        scratch = decode_scratch(*sizes, self._pool.device)
        return FusedAlone(self._pool, step, scratch, self._rule)


@KV
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "mistral-window",
        "gemma2-tight-caps",
        "gemma3-linear",
        "gemma3-capped",
        "olmo3-yarn-tied",
        "gpt-oss",
        "gpt-oss-clamped",
    ],
)
def test_fused_decode_gives_the_same_tokens(family: str, kv: str, model_path: ModelPath) -> None:
    """The norms, the rotary tables and the rules of all layers reach the decode kernel."""
    path = model_path(family)
    prompt = prompt_of(41)
    settings = {"attention_backend": "fused", "kv_cache_dtype": kv}
    driver = Driver(make_engine(path, attention_backends=(FusedDecode,), **settings))
    tokens = driver.generate(0, prompt, NUM_TOKENS)
    assert tokens == transformers_greedy(path, prompt, NUM_TOKENS, kv, guess=tokens)


@pytest.mark.parametrize("folded", [False, True], ids=["", "folded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_close(family: str, folded: bool, model_path: ModelPath) -> None:
    """Compare all logits at position 329, where rotary scaling matters.

    folded: the weights of the norms are folded into the linear layers after them, as in bfloat16.
    """
    path = model_path(family)
    prompt = prompt_of(330)
    engine = make_engine(path, num_pages=100)
    if folded:
        engine._launcher.runner.model.fold_norms()
    seen: list[torch.Tensor] = []
    compute = engine._launcher.runner.model.lm_head.logits

    def spy(hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        seen.append(compute(hidden, out))
        return seen[-1]

    engine._launcher.runner.model.lm_head.logits = spy  # type: ignore[method-assign]
    Driver(engine).generate(0, prompt, 1)
    expected = _last_logits(path, tuple(prompt))
    torch.testing.assert_close(seen[0][0], expected, atol=2e-4, rtol=2e-4)


@cache
def _last_logits(path: str, prompt: tuple[int, ...]) -> Tensor:
    return transformers_logits(path, list(prompt))[-1]


@KV
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("family", ["qwen3", "llama-llama3-tied"])
def test_chunks_change_nothing(
    family: str, chunk: int, page_size: int, kv: str, model_path: ModelPath
) -> None:
    path = model_path(family)
    prompt = prompt_of(23)
    driver = Driver(make_engine(path, page_size=page_size, num_pages=64, kv_cache_dtype=kv))
    tokens = driver.generate(2, prompt, NUM_TOKENS, chunk)
    assert driver.step_id == -(-len(prompt) // chunk) + NUM_TOKENS - 1
    assert tokens == transformers_greedy(path, prompt, NUM_TOKENS, kv, guess=tokens)


@KV
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefix_in_shared_pages_changes_nothing(
    page_size: int, kv: str, model_path: ModelPath
) -> None:
    path = model_path("qwen2")
    first, tail = prompt_of(40), prompt_of(9, seed=1)
    driver = Driver(make_engine(path, page_size=page_size, kv_cache_dtype=kv))
    driver.generate(0, first, 3)
    shared = 32
    second = first[:shared] + tail
    driver.share(0, 1, shared)
    result = driver.step(Work(1, shared, tail))
    assert [int(result.tokens[0, 0])] == transformers_greedy(path, second, 1, kv)
    # The first request goes on undisturbed by the request that shares its pages.
    result = driver.step(Work(0, len(first) + 2), Work(1, len(second)))
    assert int(result.tokens[0, 0]) == transformers_greedy(path, first, 4, kv)[-1]
    assert int(result.tokens[1, 0]) == transformers_greedy(path, second, 2, kv)[-1]


@KV
@pytest.mark.parametrize("family", ["llama-linear-biases", "qwen3-moe"])
def test_mixed_batches_change_nothing(family: str, kv: str, model_path: ModelPath) -> None:
    """One step has decode requests of two lengths, a chunk that samples and one that does not."""
    path = model_path(family)
    prompts = [prompt_of(5, 1), prompt_of(30, 2), prompt_of(17, 3), prompt_of(12, 4)]
    expected = [transformers_greedy(path, prompt, 3, kv) for prompt in prompts]
    driver = Driver(make_engine(path, kv_cache_dtype=kv))
    driver.step(Work(3, 0, prompts[0]), Work(0, 0, prompts[1]))
    result = driver.step(
        Work(0, 30), Work(3, 5), Work(1, 0, prompts[2]), Work(5, 0, prompts[3][:7], samples=False)
    )
    assert result.tokens[:, 0].tolist() == [expected[1][1], expected[0][1], expected[2][0], 0]
    assert result.finite.all()
    result = driver.step(Work(3, 6), Work(1, 17), Work(0, 31), Work(5, 7, prompts[3][7:]))
    assert result.tokens[:, 0].tolist() == [
        expected[0][2],
        expected[2][1],
        expected[1][2],
        expected[3][0],
    ]


def test_seeded_draws_do_not_depend_on_the_batch(model_path: ModelPath) -> None:
    path = model_path("qwen3")
    prompt = prompt_of(11)
    asked = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=-7)
    alone = Driver(make_engine(path)).generate(0, prompt, 6, sampling=asked)
    driver = Driver(make_engine(path, page_size=16))
    others = [
        SamplingParams(temperature=1.5, seed=5),
        GREEDY,
        SamplingParams(temperature=0.3, min_p=0.2, seed=0),
    ]
    works = [Work(i, 0, prompt_of(9 + i, i), sampling=s) for i, s in enumerate(others)]
    result = driver.step(*works, Work(4, 0, prompt, sampling=asked))
    tokens = [int(result.tokens[-1, 0])]
    for i in range(5):
        works = [Work(row, 9 + row + i, sampling=s) for row, s in enumerate(others)]
        result = driver.step(*works, Work(4, len(prompt) + i, sampling=asked))
        tokens.append(int(result.tokens[-1, 0]))
    assert tokens == alone
    assert alone != transformers_greedy(path, prompt, 6)


@KV
def test_nan_of_one_request_reaches_no_other_request(kv: str, model_path: ModelPath) -> None:
    """NaN is in a page of request 1, and at the unused end of a page of request 0.

    Attention reads the unused end as padding.
    Only the result of request 1 is marked as not finite.
    """
    path = model_path("llama")
    prompt = prompt_of(30)
    expected = transformers_greedy(path, prompt[:6], 3, kv)
    engine = make_engine(path, page_size=16, kv_cache_dtype=kv)
    driver = Driver(engine)
    driver.step(Work(0, 0, prompt[:6]), Work(1, 0, prompt))
    bad_page = driver.pages[1][0]
    for layer in range(2):
        values = engine._launcher.runner.pools[0].layer(layer)[1]
        values[bad_page] = torch.nan
        values[driver.pages[0][0], 10:] = torch.nan  # as a former owner of the page may leave it
    result = driver.step(Work(0, 6), Work(1, 30))
    assert result.finite.tolist() == [True, False]
    assert int(result.tokens[0, 0]) == expected[1]
    assert 0 <= result.tokens[1, 0] < VOCAB_SIZE


@pytest.mark.parametrize("context", [8, 10])
def test_a_window_may_be_as_long_as_the_context(context: int, model_path: ModelPath) -> None:
    """The layers with a window of 9 tokens have a pool of their own in both cases."""
    path, prompt = model_path("gemma4-shared"), prompt_of(3)
    memory = {"num_pages": None, "cpu_kv_bytes": 10**6, "max_running_reqs": 1, "page_size": 4}
    engine = make_engine(path, max_seq_len=context, **memory)
    assert Driver(engine).generate(0, prompt, 5, chunk=2) == transformers_greedy(path, prompt, 5)
