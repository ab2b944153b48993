"""The engine on CUDA in float32 gives the tokens that it gives on CPU, from the same weights."""

import json
import logging
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.core import EngineConfig, OutOfMemory, SamplingParams
from minisgl.core.batch import Batch
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.engine.launched import LaunchedStep
from minisgl.kernel.random import gumbel_noise
from tests.parity.driver import GREEDY, Driver, Work, logprobs_of, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BASE: dict[str, Any] = {
    "vocab_size": 1511,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def write_config(folder: Path, architecture: str) -> str:
    config = BASE | MODELS[architecture] | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def pair(path: str) -> tuple[Engine, Engine]:
    """A CPU and a CUDA engine with the same weights, large enough for peaked logits."""
    cpu = make_engine(path, dummy_weight=True)
    for parameter in cpu._launcher.runner.model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8.0)
    gpu = make_engine(path, dummy_weight=True, device="cuda", dtype="float32")
    gpu._launcher.runner.model.load_state_dict(cpu._launcher.runner.model.state_dict())
    return cpu, gpu


@pytest.mark.parametrize("architecture", MODELS)
def test_cuda_gives_the_tokens_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    cpu, gpu = pair(write_config(tmp_path, architecture))
    gpu.warm_up()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 1511, (37,), generator=generator).tolist()
    for sampling in (GREEDY, SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=5)):
        expected = Driver(cpu).generate(0, prompt, 12, 7, sampling)
        assert Driver(gpu).generate(0, prompt, 12, 7, sampling) == expected


def test_mixed_batch_on_cuda(tmp_path: Path) -> None:
    results = []
    for engine in pair(write_config(tmp_path, "Qwen3ForCausalLM")):
        driver = Driver(engine)
        driver.step(Work(3, 0, [5, 6, 7]), Work(0, 0, list(range(30))))
        result = driver.step(
            Work(0, 30), Work(3, 3), Work(1, 0, [9, 8]), Work(5, 0, [4, 5], samples=False)
        )
        results.append(result.tokens[:, 0].tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("architecture", MODELS)
def test_few_rows_after_the_last_attention(architecture: str, tmp_path: Path) -> None:
    """In bfloat16, all paths give the same log-probabilities.

    The steps run with and without piecewise graphs. Each time the last layer is computed for the
    sampled tokens only, and for all tokens. These paths use different products and norms.
    """
    path = write_config(tmp_path, architecture)
    found = []
    for graphs in (None, 0):
        engine = make_engine(
            path, dummy_weight=True, device="cuda", dtype="bfloat16", cuda_graph_max_bs=graphs
        )
        assert bool(engine._launcher.graphs.pieces) == (graphs != 0)
        for parameter in engine._launcher.runner.model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4.0)
        driver = Driver(engine)
        first = Work(3, 0, [5, 6, 7], samples=False), Work(0, 0, list(range(30)), samples=False)
        # This step samples no token, so the input of the next decode is id 0 on every path.
        driver.step(*first)
        later = Work(5, 0, list(range(70, 80)), samples=False)
        work = Work(3, 3), Work(0, 30, [7, 8, 9]), Work(1, 0, list(range(40, 67))), later
        for prompts in (False, True):
            result = driver.step(*work, logprobs=logprobs_of(*work, prompts=prompts))
            assert result.logprobs is not None
            found.append(result.logprobs)
    best = [set(ids) for ids in found[0].top_ids[:3].tolist()]
    assert all(len(one & other) < 8 for one, other in combinations(best, 2)), "reqs must differ"
    for other in found[1:]:
        assert abs(other.top[:3] - found[0].top[:3]).max() < 0.1
        for expected, ids in zip(best, other.top_ids[:3].tolist(), strict=True):
            assert len(expected & set(ids)) > 12


class Operations(TorchDispatchMode):
    """Records the torch operations that run inside, without those of CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **kwargs or {})


def test_products_of_a_mixed_step_are_all_in_graphs(tmp_path: Path) -> None:
    """cuBLAS takes 0.1 s to load a kernel for a number of rows that it sees for the first time.

    The warm-up must run every number of rows that requests can bring.
    """
    path = write_config(tmp_path, "Qwen3MoeForCausalLM")
    driver = Driver(make_engine(path, dummy_weight=True, device="cuda", dtype="bfloat16"))
    driver.step(Work(3, 0, [5, 6, 7]), Work(0, 0, list(range(30))))
    work = Work(3, 3), Work(0, 30, [7, 8, 9]), Work(1, 0, list(range(40, 67)))
    products = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::linear"}
    with Operations() as plain:
        driver.step(*work)
    assert not plain.names & products
    with Operations() as whole:
        driver.step(*work, logprobs=logprobs_of(*work, prompts=True))
    assert whole.names & products


def test_auto_takes_the_gpu_and_the_checkpoints_dtype(tmp_path: Path) -> None:
    path = write_config(tmp_path, "Qwen3ForCausalLM")
    engine = make_engine(path, dummy_weight=True, device="auto", num_pages=None, memory_ratio=0.2)
    facts = engine.facts()
    assert (facts.device, facts.dtype) == ("cuda:0", "bfloat16")
    assert facts.kv_capacity_tokens == 6 * 4096
    assert Driver(engine).step(Work(0, 0, [1, 2, 3])).finite.all()
    with pytest.raises(OutOfMemory):
        make_engine(path, dummy_weight=True, device="cuda", num_pages=None, memory_ratio=1e-9)


def test_warm_up_runs_the_longest_chunk_if_the_number_of_pages_is_given(tmp_path: Path) -> None:
    """If num_pages is given, only the warm-up runs the largest step.

    Attention has different kernels for few and for many prompt tokens, and no request may be the
    first to need them.
    """
    path = write_config(tmp_path, "Qwen3ForCausalLM")
    engine = make_engine(path, dummy_weight=True, device="cuda", dtype="bfloat16")
    tokens: list[int] = []
    launch = engine.launch

    def spy(batch: Batch) -> LaunchedStep:
        tokens.append(len(batch.chunk_ids))
        return launch(batch)

    engine.launch = spy  # type: ignore[method-assign]
    engine.warm_up()
    assert max(tokens) == 8192


def test_noise_is_the_same_on_both_devices() -> None:
    seeds, positions = torch.arange(-4, 4), torch.arange(8)
    on_cpu = gumbel_noise(seeds, positions, 4099)
    on_gpu = gumbel_noise(seeds.cuda(), positions.cuda(), 4099).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, atol=2e-6, rtol=2e-6)


def test_graphs_take_at_most_the_predicted_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver takes memory for each graph, outside of torch's pool, also for small graphs."""
    path = write_config(tmp_path, "Qwen3ForCausalLM")
    config = EngineConfig(model_path=path, device="cuda", dummy_weight=True, memory_ratio=0.5)
    with caplog.at_level(logging.INFO, "minisgl.engine.start"):
        engine = Engine(config, SingleCommunicator())
    engine.close()
    predicted, taken = (int(n) for n in re.findall(r"graph_bytes=(\d+)", caplog.text))
    print(f"graph bytes predicted {predicted:,} taken {taken:,}")
    assert 0 < taken <= predicted
