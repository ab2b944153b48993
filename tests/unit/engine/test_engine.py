"""The engine: sizes, rejected settings, token pool, facts and warm-up."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from msgspec import structs

from minisgl.core import ConfigError, EngineConfig, OutOfMemory, SamplingParams
from minisgl.core.batch import Batch
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.drafts import PricedLengths
from minisgl.engine import Engine, memory, resolve_device
from minisgl.engine.graphs import DecodeShape
from minisgl.engine.logits_processing import upload
from minisgl.engine.memory import cpu_threads, further_graph_bytes, memory_of
from minisgl.engine.warmup import (
    StepShape,
    run_every_size,
    time_steps,
    timed_shapes,
    warm_up,
    warmup_batch,
)
from minisgl.utils import host_memory
from tests.parity.driver import Driver, Work, logprobs_of, make_engine
from tests.parity.models import VOCAB_SIZE, build_model
from tests.unit.engine.virtual_engine import VirtualEngine, VirtualPending


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("models"))


def test_facts_describe_the_loaded_model(path: str) -> None:
    facts = make_engine(path, max_seq_len=200).facts()
    assert (facts.max_seq_len, facts.vocab_size, facts.eos_token_ids) == (200, VOCAB_SIZE, (2,))
    assert (facts.kv_capacity_tokens, facts.page_size) == (256, 4)
    assert (facts.device, facts.dtype, facts.kv_dtype) == ("cpu", "float32", "float32")
    assert make_engine(path, kv_cache_dtype="fp8").facts().kv_dtype == "fp8"
    plain = make_engine(path, dtype="bfloat16", kv_cache_dtype="bf16")
    assert plain.facts().kv_dtype == "bfloat16"


def test_more_tokens_fit_into_the_same_memory_in_fp8(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    room: dict[str, Any] = {"num_pages": None, "cpu_kv_bytes": 64 * 2**10, "dtype": "bfloat16"}
    with caplog.at_level(logging.INFO, "minisgl"):
        pages = [make_engine(path, **room, kv_cache_dtype=kv).num_pages for kv in ("auto", "fp8")]
    assert pages == [32, 60]  # 2 * 2 * 2 heads * 64 or 34 bytes, for 4 tokens
    assert "KV cache in fp8: 1.88 times as many tokens fit" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"max_seq_len": 513}, r"max_seq_len 513 is outside 2\.\.512"),
        ({"max_seq_len": 1}, "max_seq_len 1 is outside"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"page_size": 12}, "page_size 12 is not a power of two"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"dtype": "int8"}, "dtype 'int8' .* supported: auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype 'fp4' .* supported: auto, bf16, fp8"),
        ({"kv_cache_dtype": "bf16"}, "bf16 needs dtype bfloat16, but the model runs in float32"),
        ({"device": "tpu"}, "device 'tpu' .* supported: auto, cpu, cuda"),
        ({"attention_backend": "nope"}, "attention backend 'nope'"),
        ({"moe_backend": "nope"}, "MoE backend 'nope'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    path: str, overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_engine(path, **overrides)


def test_kv_pages_fill_the_bytes_given(path: str) -> None:
    page_bytes = 2 * 2 * 4 * 2 * 32 * 4  # k and v, layers, page size, KV heads, head_dim, float32
    engine = make_engine(path, num_pages=None, cpu_kv_bytes=10 * page_bytes + 1)
    assert engine.num_pages == 10
    capped = make_engine(path, num_pages=None, max_running_reqs=2, max_seq_len=30)
    assert capped.num_pages == 16, "no more pages than all rows can use"
    with pytest.raises(OutOfMemory, match="one KV page of 4 tokens"):
        make_engine(path, num_pages=None, cpu_kv_bytes=page_bytes - 1)


def test_the_token_pool_holds_the_sampled_tokens_only(path: str) -> None:
    engine = make_engine(path)
    driver = Driver(engine)
    result = driver.step(Work(2, 0, [5, 6, 7]), Work(4, 0, [8, 9], samples=False))
    pool = engine._launcher.runner.token_pool
    assert int(pool[2, 3]) == result.tokens[0, 0]
    assert pool.count_nonzero() <= 1
    assert result.tokens[1, 0] == 0


def test_cleared_tokens_make_decodes_independent_of_the_warm_up(path: str) -> None:
    found = []
    for warm in (False, True):
        engine = make_engine(path)
        if warm:
            run_every_size(engine, 8)
            assert int(engine._launcher.runner.token_pool[1, 12]) > 0
        driver = Driver(engine)
        driver.clear_tokens()
        driver.step(Work(1, 0, list(range(5, 17)), samples=False))
        result = driver.step(Work(1, 12), logprobs=logprobs_of(Work(1, 12), prompts=False))
        assert result.logprobs is not None
        found.append(result.logprobs.top)
    assert found[0].tolist() == found[1].tolist()


def test_last_position_of_the_context_can_be_computed(path: str) -> None:
    engine = make_engine(path, max_seq_len=12)
    driver = Driver(engine)
    driver.step(Work(0, 0, list(range(11))))
    result = driver.step(Work(0, 11))
    assert int(engine._launcher.runner.token_pool[0, 12]) == result.tokens[0, 0]


def test_a_step_in_which_no_request_samples_computes_no_logits(path: str) -> None:
    engine = make_engine(path)

    def refuse(hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("logits were computed")

    engine._launcher.runner.model.lm_head.logits = refuse  # type: ignore[method-assign]
    driver = Driver(engine)
    result = driver.step(Work(0, 0, [1, 2, 3], samples=False))
    assert result.tokens[:, 0].tolist() == [0]
    assert result.finite.tolist() == [True]
    with pytest.raises(AssertionError, match="logits were computed"):
        driver.step(Work(1, 0, [1, 2, 3]))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_only_sampled_positions_are_computed_after_the_last_attention(
    family: str, tmp_path: Path
) -> None:
    """The last attention has already stored the keys and values of all tokens."""
    engine = make_engine(build_model(family, tmp_path))
    seen: list[int] = []
    for layer in engine._launcher.runner.model.model.layers:
        layer.mlp.register_forward_hook(lambda block, given, out: seen.append(len(given[0].x)))
    driver = Driver(engine)

    def rows(*work: Work, prompts: bool = False) -> list[int]:
        seen.clear()
        driver.step(*work, logprobs=logprobs_of(*work, prompts=True) if prompts else ())
        return seen

    assert rows(Work(0, 0, [1, 2, 3, 4, 5]), Work(1, 0, [6, 7, 8])) == [8, 2]
    assert rows(Work(0, 5), Work(1, 3), Work(2, 0, [9, 8, 7])) == [5, 3]
    assert rows(Work(0, 6), Work(2, 3, [6, 5], samples=False)) == [3, 2]
    assert rows(Work(0, 7), Work(1, 4)) == [2, 2]
    assert rows(Work(2, 5, [4, 3, 2], samples=False)) == [3]
    assert rows(Work(2, 8, [1, 2, 3]), Work(3, 0, [4, 5], samples=False), prompts=True) == [5, 5]
    assert rows(Work(3, 2, [1, 2, 3], samples=False), prompts=True) == [3, 3]


@pytest.mark.parametrize("folded", [False, True], ids=["", "folded"])
def test_prompt_logprobs_do_not_change_the_other_results(folded: bool, path: str) -> None:
    """Prompt log-probabilities need the hidden states of all tokens. Other steps need fewer."""
    found = []
    for prompts in (False, True):
        engine = make_engine(path)
        if folded:
            engine._launcher.runner.model.fold_norms()
        driver = Driver(engine)
        driver.step(Work(4, 0, [5, 6, 7]), Work(0, 0, list(range(11))))
        later = Work(2, 0, list(range(40, 49)), samples=False)
        work = Work(0, 11), Work(4, 3), Work(1, 0, list(range(20, 33))), later
        result = driver.step(*work, logprobs=logprobs_of(*work, prompts=prompts))
        assert result.logprobs is not None
        assert result.prompt_logprobs is not None
        assert sorted(result.prompt_logprobs) == ([2, 3] if prompts else [])
        found.append((result.tokens[:3, 0].tolist(), result.logprobs))
    (tokens, few), (same_tokens, every) = found
    assert same_tokens == tokens
    for name in ("chosen", "top_ids", "top"):
        np.testing.assert_allclose(getattr(every, name)[:3], getattr(few, name)[:3], atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_dtype": "fp8"}, {"max_running_reqs": 1, "drafts": PricedLengths(1)}],
    ids=["plain", "fp8", "drafts"],
)
def test_the_warm_up_on_a_cpu_times_two_steps_and_leaves_no_trace(
    settings: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(20))
    untouched = Driver(make_engine(path, **settings)).generate(0, prompt, 5)
    engine = make_engine(path, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "launch", launch := Mock(side_effect=engine.launch))
        timed = engine.warm_up()
    assert launch.call_count == 7, "a CPU has no kernels to compile; it runs timed steps only"
    assert [step.tokens for step in timed] == [1, 32]
    assert all(step.seconds > 0 for step in timed)
    assert not engine._launcher.runner.pools[0].layer(0)[0].float().any()
    assert Driver(engine).generate(0, prompt, 5) == untouched


@pytest.mark.parametrize(
    ("graph_reqs", "chunks", "tokens"),
    [
        (1, [32], [1, 32]),  # a CPU
        (256, [512, 2048], [1, 256, 512, 2048]),
        (16, [512, 1000], [1, 16, 512, 1000]),
        (256, [64, 64], [1, 256]),  # --max-prefill-length 64
        (1, [1, 1], [1]),
    ],
)
def test_timed_steps_are_decode_steps_and_longer_chunks(
    graph_reqs: int, chunks: list[int], tokens: list[int]
) -> None:
    shapes = timed_shapes(graph_reqs, chunks, 4096)
    assert [shape.num_decode + shape.chunk for shape in shapes] == tokens
    assert [shape.num_decode for shape in shapes if shape.num_decode] == sorted({1, graph_reqs})


def test_timed_chunks_fit_into_the_context(path: str) -> None:
    engine = make_engine(path, max_running_reqs=3)
    timed = time_steps(engine, timed_shapes(3, [16, 4096], engine.max_seq_len))
    assert [step.tokens for step in timed] == [1, 3, 16, engine.max_seq_len]
    assert min(step.seconds for step in timed) > 0


@pytest.mark.parametrize(("rows", "mixed"), [(1, set()), (2, {(1, 3)}), (3, {(2, 3)})])
def test_the_warm_up_has_a_mixed_step_if_two_requests_fit(
    rows: int, mixed: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, found = VirtualEngine(), set()
    engine.max_running_reqs = rows

    def launch(batch: Batch) -> VirtualPending:
        found.add((batch.num_decode, len(batch.chunk_ids)))
        return VirtualEngine.launch(engine, batch)

    monkeypatch.setattr(engine, "launch", launch)
    warm_up(engine)
    assert found == {(1, 0), (0, 4)} | mixed


def test_warm_up_steps_read_distinct_pages_and_write_to_the_dummy_page(path: str) -> None:
    engine = make_engine(path)
    batch = warmup_batch(engine, StepShape(2, 5, 10))
    assert batch is not None
    pages = batch.page_updates.ids.reshape(3, -1)
    assert engine.page_size == 4
    assert pages[:, :2].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (pages[:, 2:] == engine.num_pages).all()


def test_bfloat16_runs(path: str) -> None:
    engine = make_engine(path, dtype="bfloat16")
    tokens = Driver(engine).generate(
        0, [1, 2, 3], 4, sampling=SamplingParams(temperature=0.8, top_k=5, seed=0)
    )
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert engine.facts().dtype == "bfloat16"


def test_dummy_weights_need_no_checkpoint(path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(path) / "config.json").read_bytes())
    engine = make_engine(str(tmp_path), dummy_weight=True)
    result = Driver(engine).step(Work(0, 0, [1, 2, 3]))
    assert result.finite.all()


def test_upload_keeps_dtypes_and_values() -> None:
    arrays = {
        "a": np.array([1, 2, 3], dtype=np.int32),
        "empty": np.array([], dtype=np.float32),
        "b": np.array([-(2**63), 5], dtype=np.int64),
        "c": np.array([0.5], dtype=np.float32),
    }
    sent = upload(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert sent[name].dtype == torch.from_numpy(array).dtype
        assert sent[name].tolist() == array.tolist()


def test_missing_memory_is_reported_as_out_of_memory(path: str) -> None:
    """A configuration that asks for too much memory is not a bug, so it needs no traceback."""
    with pytest.raises(OutOfMemory, match=r"not enough memory on cpu: .* 40960000000004096 bytes"):
        make_engine(path, num_pages=10**13)
    gpu = torch.device("cuda", 0)
    with pytest.raises(OutOfMemory, match="not enough memory on cuda:0: CUDA"), memory_of(gpu):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RuntimeError, match="another matter"), memory_of(gpu):
        raise RuntimeError("another matter")


def test_random_weights_beyond_the_memory_of_a_cpu_are_refused_before_they_are_drawn(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: Linux killed the process while it drew the weights."""
    free = host_memory.cpu_free_bytes()
    assert free > 2**20
    monkeypatch.setattr(host_memory, "cpu_free_bytes", lambda: 2**10)
    make_engine(path)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_build_model", None)
        with pytest.raises(ConfigError, match=r"weights of 0\.\d GiB and KV pages of 0\.\d GiB do"):
            make_engine(path, dummy_weight=True, num_pages=64)
    monkeypatch.setattr(host_memory, "cpu_free_bytes", lambda: free)
    with pytest.raises(ConfigError, match=r"pages of 3814697\.3 GiB do not fit into"):
        make_engine(path, dummy_weight=True, num_pages=10**12)


def test_free_memory_of_a_cpu_is_at_most_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"meminfo": "MemTotal:  9 kB\nMemAvailable:  6 kB\n", "memory.max": "max\n"}
    monkeypatch.setattr(Path, "read_text", lambda file, encoding: texts[file.name])
    assert host_memory.cpu_free_bytes() == 6 * 1024
    texts["memory.max"] = "5000\n"
    assert host_memory.cpu_free_bytes() == 5000


def test_cpu_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(memory, "usable_cores", lambda: 8)
    config = EngineConfig(model_path="")
    threads = [
        cpu_threads(structs.replace(config, tp_size=ranks, spare_cores=spare))
        for ranks, spare in ((1, 0), (1, 1), (2, 0), (2, 1), (9, 0), (1, 8))
    ]
    assert threads == [8, 7, 4, 3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu_threads(config) is None


def test_more_ranks_than_gpus_are_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    with pytest.raises(ConfigError, match="there is no visible GPU"):
        resolve_device(EngineConfig(model_path="x", device="cuda", tp_size=2), TPInfo(0, 2))
    assert resolve_device(EngineConfig(model_path="x"), TPInfo(0, 1)) == torch.device("cpu")


@pytest.mark.parametrize(
    ("free", "decode", "pieces", "expected"),
    [
        ([100, 60, 57, 40, 38], 3, 5, (3 + 4) + 3 * (2 + 4)),
        ([100, 60, 40, 38], 1, 3, 2 + 4),
        ([100, 60, 57], 4, 0, 2 * (3 + 4)),
        ([100, 60, 62, 40, 40], 3, 3, 2 * 4),
        ([100, 60, 57, 40, 38], 2, 2, 0),
        ([100], 0, 24, 0),
    ],
)
def test_a_further_graph_takes_the_memory_of_the_second_one_of_its_kind(
    free: list[int], decode: int, pieces: int, expected: int
) -> None:
    """The first graph of a kind also allocates the tensors that the second one reuses.

    The margin of a graph is 4 MiB.
    """
    mib = 2**20
    shapes = [DecodeShape(reqs + 1, 1) for reqs in range(decode)]
    sizes = list(range(16, 16 * (pieces + 1), 16))
    found = further_graph_bytes([mib * each for each in free], shapes, sizes)
    assert found == mib * expected


def test_close_gives_the_memory_back(path: str) -> None:
    comm = SingleCommunicator()
    engine = Engine(EngineConfig(model_path=path, num_pages=8), comm)
    engine.close()
    assert not hasattr(engine, "_launcher")
