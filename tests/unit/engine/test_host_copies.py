"""Copies of KV pages to host memory and back, and requests that continue from them."""

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.noise import fill_noise
from minisgl.core import ConfigError, SamplingParams, SchedulerConfig
from minisgl.core.batch import Int32Array
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS, host_copies, host_lock
from minisgl.engine.host_copies import HostPageCopier
from minisgl.engine.host_lock import HostMemoryLock
from minisgl.kvcache import host, states
from minisgl.kvcache.pool import KVPool, KVSpec
from minisgl.kvcache.window import window_kinds
from minisgl.message.messages import AddReq, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from tests.parity.driver import make_engine
from tests.parity.hybrid_models import MODELS as HYBRIDS
from tests.parity.hybrid_models import save
from tests.parity.models import VOCAB_SIZE, build_model

CPU = torch.device("cpu")
OTHER_KIND = replace(DEFAULT_EXTENSIONS, cache_kinds=(window_kinds,))  # is never called


def ids(*numbers: int) -> Int32Array:
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_page_comes_back_with_equal_bytes(fp8: bool) -> None:
    """Regression of another engine: the keys of an FP8 pool came back without their scales."""
    spec = KVSpec(2, 16, torch.bfloat16, fp8)
    pool = KVPool(spec, layers=(0, 2), num_pages=8, page_size=4, device=CPU)
    fill_noise(pool, 8)
    if (scales := pool.scales(0)) is not None:
        scales.normal_()
    before = [part.clone() for part in pool.parts()]
    copies = HostPageCopier(pool, num_blocks=5)
    copies._piece = 2
    copies.start(1, ids(6, 1, 3), ids(4, 0, 2), load=False)
    copies.finish(1)
    for part in pool.parts():
        part.zero_()
    copies.start(2, ids(0, 7, 5), ids(0, 2, 4), load=True)
    assert copies.done(0.0) == [2]
    assert copies.done(0.0) == []
    copies.finish(2)
    for part, old in zip(pool.parts(), before, strict=True):
        assert torch.equal(part[:, [0, 7, 5]], old[:, [1, 3, 6]])
        assert not part[:, [1, 2, 3, 4, 6]].any()


class Link:
    """Takes the place of a GPU's events. The pieces of copies end when the test sets `may_end`.

    launched: the device of each piece. is_full: set when the thread of copies waits for a piece.
    """

    def __init__(self) -> None:
        self.launched: list[torch.device | None] = []
        self._current: torch.device | None = None
        self.is_full, self.may_end = threading.Event(), threading.Event()

    def Event(self, blocking: bool) -> "Link":
        return self

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._current = device
        yield
        self._current = None

    def record(self) -> None:
        self.launched.append(self._current)

    def query(self) -> bool:
        return self.may_end.is_set()

    def synchronize(self) -> None:
        self.is_full.set()
        self.may_end.wait()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    link = Link()
    monkeypatch.setattr(torch.cuda, "Event", link.Event)
    monkeypatch.setattr(torch.cuda, "device", link.device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda pages: pages)
    monkeypatch.setattr(host_copies, "_AHEAD", 2)
    yield link
    link.may_end.set()  # also after a failed test, or its threads would never end


def copies_by_threads() -> HostPageCopier:
    """Return copies of a pool on the CPU that have the threads of a GPU, in pieces of a page."""
    spec = KVSpec(2, 16, torch.bfloat16, fp8=False)
    pool = KVPool(spec, layers=(0, 2), num_pages=8, page_size=4, device=CPU)
    fill_noise(pool, 8)
    copies = HostPageCopier(pool, num_blocks=5)
    copies._streams = [SimpleNamespace(synchronize=int)] * 2  # streams without work
    copies._threads = [ThreadPoolExecutor(1) for _ in range(2)]
    copies._piece = 1
    return copies


def test_the_buffers_of_copies_are_not_in_the_block_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps the memory of each stream apart. The block belongs to the stream of the steps."""
    current, streams = ["steps"], iter(["stores", "loads"])
    allocated: list[str] = []

    @contextmanager
    def stream(chosen: str) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocated.append(current[-1])
        return torch.zeros(shape, dtype=dtype)

    spec = KVSpec(2, 16, torch.bfloat16, fp8=False)
    pool = KVPool(spec, layers=(0, 2), num_pages=8, page_size=4, device=CPU)
    pool.device = torch.device("cuda", 1)
    monkeypatch.setattr(host_copies, "_stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", empty)
    HostPageCopier(pool, num_blocks=5)
    assert allocated == ["stores", "loads"]


def test_the_scheduler_does_not_wait_while_pieces_are_launched(link: Link) -> None:
    """Streams had gaps of 79 ms: the thread of the scheduler launched all pieces of a copy."""
    copies = copies_by_threads()
    copies.start(1, ids(6, 1, 3, 7, 0), ids(4, 0, 2, 1, 3), load=False)
    link.is_full.wait()
    assert link.launched == [CPU] * 2, "a new thread has GPU 0 in place of the GPU of its rank"
    assert copies.done(0.0) == []
    link.may_end.set()
    copies.finish(1)
    assert link.launched == [CPU] * 5
    for pages, blocks in zip(copies._pages, copies._blocks, strict=True):
        assert torch.equal(blocks, pages[[1, 7, 3, 0, 6]])
    copies.close()


def test_an_error_of_a_launch_ends_the_scheduler(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = copies_by_threads()
    monkeypatch.setattr(torch, "index_select", lambda *args, **named: 1 / 0)
    copies.start(1, ids(6), ids(4), load=False)
    wait([launch for launch in copies._jobs.values() if launch is not None])
    with pytest.raises(ZeroDivisionError):  # on rank 0
        copies.done(0.0)
    with pytest.raises(ZeroDivisionError):  # on the other ranks
        copies.finish(1)
    copies.close()


def test_each_rank_checks_the_free_memory_that_the_ranks_found_before_any_allocation(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`agree_min` returns after all ranks have called it."""
    events: list[str] = []
    agree, new = SingleCommunicator.agree_min, HostPageCopier.__init__

    def measure() -> int:
        events.append("measured")
        return 10**12

    def agree_min(self: SingleCommunicator, value: int) -> int:
        events.extend(["agreed"] * (value == 10**12))
        return agree(self, value)

    def allocate(self: HostPageCopier, pool: KVPool, num_blocks: int) -> None:
        events.append("allocated")
        new(self, pool, num_blocks)

    monkeypatch.setattr(host_copies, "cpu_free_bytes", measure)
    monkeypatch.setattr(SingleCommunicator, "agree_min", agree_min)
    monkeypatch.setattr(HostPageCopier, "__init__", allocate)
    path = build_model("qwen3", tmp_path_factory.mktemp("models"))
    engine = make_engine(path, num_pages=8, host_cache_gb=1e-3)
    assert events == ["measured", "agreed", "allocated"]
    monkeypatch.setattr(HostPageCopier, "close", lambda self: events.append("closed"))
    engine.close()
    assert events[-1] == "closed"


class Driver:
    """Records the ranges of host memory that are locked, as the CUDA driver does.

    most: the number of ranges that it locks. refusal: the status of the next ones, or an error.
    """

    def __init__(self, most: int = 100, refusal: int | Exception = 2) -> None:
        self.locked: dict[int, int] = {}
        self._most, self._refusal = most, refusal

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0, "two ranges may share a page"
        if len(self.locked) == self._most:
            if isinstance(self._refusal, Exception):
                raise self._refusal
            return self._refusal
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, 0) else 1


def lock_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> HostMemoryLock:
    """Return the lock of 2 parts with 10 blocks of 1 and of half a page, 2 pages in a chunk."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(host_lock, "_CHUNK_BYTES", 2 * mmap.PAGESIZE)
    pages = (torch.empty(1, mmap.PAGESIZE // share, dtype=torch.uint8) for share in (1, 2))
    return HostMemoryLock([host_copies._reserve(each, 10) for each in pages], CPU)


def test_host_memory_is_locked_by_chunks_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    lock = lock_of(driver, monkeypatch)
    assert (lock.num_open, lock.has_ended, driver.locked) == (0, False, {})
    lock.start()
    lock.wait(11)  # more than there are: it returns at the end of the thread
    assert (lock.num_open, lock.has_ended) == (10, True)
    assert sorted(driver.locked.values()) == [mmap.PAGESIZE] + [2 * mmap.PAGESIZE] * 7


def test_host_memory_is_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory that is still locked would make the driver refuse a later lock of it."""
    driver = Driver()
    lock = lock_of(driver, monkeypatch)
    lock.start()
    lock.wait(10)
    lock.close()
    assert not driver.locked


@pytest.mark.parametrize("refusal", [2, RuntimeError("cannot lock"), MemoryError()], ids=repr)
def test_a_rank_that_can_lock_less_than_rank_0_goes_on_with_unlocked_blocks(
    refusal: int | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies them more slowly. An error would end the server, and a wait would hang it."""
    lock = lock_of(Driver(4, refusal), monkeypatch)
    lock.start()
    lock.wait(9)
    assert (lock.num_open, lock.has_ended) == (4, True)


def second_answer(path: str, **settings: Any) -> tuple[int, list[Any]]:
    """Answer a prompt, other prompts, and the first one again.

    Returns the number of its cached tokens, and its tokens with their log-probabilities.
    """
    engine, outbox = make_engine(path, **settings), deque[StepOutput]()
    inbox = LocalInbox()
    config = SchedulerConfig(overlap=False, target_step_ms=None, prefill_budget_tokens=16)
    scheduler = Scheduler(
        engine,
        config,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        inbox=inbox,
        send=outbox.append,
    )
    source = np.random.default_rng(0)
    prompts = source.integers(3, VOCAB_SIZE, (3, 15 * engine.page_size + 1))
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0, logprobs=2)
    cached, found = 0, []
    for uid, prompt in enumerate([*prompts, prompts[0]]):
        text = prompt.astype("<i4").tobytes()
        inbox.messages.append(AddReq(uid=uid, token_ids=text, sampling=sampling))
        while inbox.messages or not scheduler.idle:
            scheduler.iterate()
        outputs = [*outbox]
        outbox.clear()
        cached = sum(done.cached_tokens for each in outputs for done in each.prefill_done)
        found = [(each.token_ids, each.logprobs) for each in outputs]
    return cached, found


@pytest.mark.parametrize(
    ("model", "page_size", "few"),
    [("qwen3", 4, 20), ("gemma3", 4, 20), ("qwen3_next", 16, 40)],
    ids=["full attention", "windows", "recurrent states"],
)
def test_a_hit_in_host_memory_gives_the_bits_of_a_hit_on_the_device(
    model: str,
    page_size: int,
    few: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`few` pages hold one prompt, so all of them have to be copied before the next one."""
    monkeypatch.setattr(host, "_CLEAN_SHARE", 1)
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", 16)
    folder = tmp_path_factory.mktemp("models")
    path = save(model, folder)[1] if model in HYBRIDS else build_model(model, folder)
    on_device = second_answer(path, page_size=page_size, num_pages=256)
    lost = second_answer(path, page_size=page_size, num_pages=few)
    in_host = second_answer(path, page_size=page_size, num_pages=few, host_cache_gb=2e-3)
    assert (on_device[0], lost[0]) == (15 * page_size, 0)
    assert in_host == on_device


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (
            "qwen3",
            {"host_cache_gb": 0.01, "extensions": OTHER_KIND},
            "does not hold the memory of the kinds of the extensions",
        ),
        ("qwen3", {"host_cache_gb": 1e6}, "does not fit beside other data into the"),
        ("qwen3", {"host_cache_gb": 1e-9}, "holds no KV page"),
        ("qwen3", {"host_cache_gb": -1.0}, "host_cache_gb must be at least 0 GB"),
    ],
)
def test_a_host_cache_that_cannot_be_is_refused(
    tmp_path_factory: pytest.TempPathFactory, model: str, settings: dict[str, Any], says: str
) -> None:
    path = build_model(model, tmp_path_factory.mktemp("models"))
    with pytest.raises(ConfigError, match=says):
        make_engine(path, **settings)
