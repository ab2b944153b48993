"""Copies of KV pages between a GPU and host memory, beside the steps of other requests."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.noise import fill_noise
from bench.step import contexts_of, decode_batch, kernel_times, run_steps
from minisgl.core.batch import Int32Array
from minisgl.engine import host_lock
from minisgl.engine.host_copies import HostPageCopier
from minisgl.kvcache.pool import KVPool, KVSpec
from tests.gpu.test_engine import write_config
from tests.parity.driver import make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def wait(copies: HostPageCopier, job: int) -> None:
    ended: list[int] = []
    while job not in ended:
        ended += copies.done(0.001)
    copies.finish(job)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_pages_come_back_with_equal_bytes_while_steps_run(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores and two loads are open at a time. Each has several pieces, chunks and runs."""
    monkeypatch.setattr(host_lock, "_CHUNK_BYTES", 2**22)
    device = torch.device("cuda")
    spec, count = KVSpec(8, 128, torch.bfloat16, fp8), 400
    pool = KVPool(spec, layers=range(4), num_pages=2 * count, page_size=16, device=device)
    fill_noise(pool, count)
    if (scales := pool.scales(1)) is not None:
        scales.normal_()
    before = [part[:, :count].clone() for part in pool.parts()]
    copies = HostPageCopier(pool, num_blocks=count)
    copies._piece = 64
    assert copies.num_open == 0
    copies.start_opening()
    copies.wait_open(count)
    source = np.random.default_rng(0)
    blocks: Int32Array = source.permutation(count).astype(np.int32)
    pages: Int32Array = np.arange(count, dtype=np.int32)
    halves = slice(None, None, 2), slice(1, None, 2)
    work = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for job, half in enumerate(halves):
            copies.start(job, pages[half], blocks[half], load=False)
            work = torch.tanh(work @ work)
    wait(copies, 0)
    wait(copies, 1)
    torch.cuda.synchronize()
    for part in pool.parts():
        part[:, :count].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for job, half in enumerate(halves):
            copies.start(job, pages[half] + count, blocks[half], load=True)
            work = torch.tanh(work @ work)
    wait(copies, 0)
    wait(copies, 1)
    for part, old in zip(pool.parts(), before, strict=True):
        assert torch.equal(part[:, count : 2 * count], old)
        assert not part[:, :count].any()
    assert all(blocks.is_pinned() for blocks in copies._blocks)
    copies.close()
    assert not any(blocks.is_pinned() for blocks in copies._blocks)


def test_a_plain_decode_step_copies_nothing_by_a_copy_engine(tmp_path: Path) -> None:
    """Its small copies would wait there for the transfers of pages."""
    path = write_config(tmp_path, "Qwen3ForCausalLM")
    engine = make_engine(path, dummy_weight=True, device="cuda", num_pages=200)
    contexts = contexts_of(2, 8, ragged=False)
    batches = [decode_batch(engine, contexts, number) for number in range(4)]
    run_steps(engine, batches)
    names = [kernel.name for kernel in kernel_times(engine, batches)]
    assert "_copy_words" in names
    assert not [name for name in names if name.startswith("Memcpy")]
