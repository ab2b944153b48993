"""Request traces with block hashes, and the hit ratios of an LRU and an ideal prefix cache on them.

The file format is the one of the Mooncake traces (FAST '25): one JSON object per line, with
timestamp (ms), input_length, output_length (tokens) and hash_ids, one for each block of 512 tokens.
Prompts that share their first k hash ids share their first 512 k tokens.

A trace of agents has three further fields: the id of a request, `after`, the ids of the requests
that end before it is sent, and gap_ms, the time of a tool or a user between the last end and it.
It may also have the session and the agent of each request, and `end` in the last one of an agent.
With sessions, an agent's next prompt begins with the whole prompt before it, an incomplete last
block included. The condition is that both prompts begin with the same blocks up to that last one.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.core import ConfigError
from minisgl.core.batch import Int32Array

BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    id: int | None = None
    after: tuple[int, ...] = ()
    gap_ms: float = 0.0
    session: int | None = None
    agent: int = 0
    end: bool = False


class Turn(NamedTuple):
    """A request is sent gap_s seconds after the ends of the requests with the indices `after`.

    number: of the request among those of its agent, from 1.
    """

    after: tuple[int, ...] = ()
    gap_s: float = 0.0
    number: int = 1


class Load(NamedTuple):
    """The requests of a benchmark.

    prompts     int32 [tokens] each.
    max_tokens  output tokens of each request.
    arrivals_s  seconds after the first arrival; None: a request is sent when another one ends.
    clients     the client of each request; None: all requests come from one client.
    priorities  the priority of each request; None: 0.
    stable      tokens of each prompt that later prompts may share (AddReq.prefixes); None: unknown.
    turns       of each request; None: no request waits for another one. A request that does not
                wait arrives at its arrival time.
    sessions    the session of each request; None: unknown.
    last        its session has no request after it. With `sessions`.
    """

    prompts: list[Int32Array]
    max_tokens: list[int]
    arrivals_s: list[float] | None = None
    clients: list[str] | None = None
    priorities: list[int] | None = None
    stable: list[int] | None = None
    turns: list[Turn] | None = None
    sessions: list[str] | None = None
    last: list[bool] | None = None

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens of each prompt."""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)


class Turns:
    """Tells when each request of a load is due."""

    def __init__(self, load: Load, arrivals_s: list[float]) -> None:
        """arrivals_s: of the requests of `load`, or of the first ones, if no request waits."""
        self._turns = load.turns or [Turn()] * len(arrivals_s)
        self._open = [{*turn.after} for turn in self._turns]
        self._next: dict[int, list[int]] = {}
        for index, after in enumerate(self._open):
            for before in after:
                self._next.setdefault(before, []).append(index)
        self.first = [(s, i) for i, s in enumerate(arrivals_s) if not self._open[i]]

    def ended(self, index: int, now_s: float) -> list[tuple[float, int]]:
        """Request `index` ends now. Returns the due times and indices of those that waited."""
        due = []
        for follower in self._next.get(index, ()):
            self._open[follower].discard(index)
            if not self._open[follower]:
                due.append((now_s + self._turns[follower].gap_s, follower))
        return due


def read_trace(path: Path, count: int | None = None) -> list[TraceRequest]:
    """Read the first `count` requests, ordered by time. Raises ConfigError with the bad line."""
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines[:count], start=1):
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} line {number}: {error}") from None
        if not 1 <= request.input_length <= BLOCK_TOKENS * len(request.hash_ids):
            raise ConfigError(f"{path} line {number}: hash_ids do not cover input_length")
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def replay(
    requests: list[TraceRequest],
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    largest_id: int = 10_000,
) -> Load:
    """Return a load in which each hash id is a block of pseudo-random tokens.

    time_scale: factor for the arrival times and the gaps. length_scale: factor for the lengths of
    blocks and outputs; prompts still share the same blocks. max_prompt_tokens, max_output_tokens:
    longer prompts and outputs are cut. largest_id: largest token id.

    Without sessions, prompts share whole blocks, so the stable part of each is its whole blocks.

    Raises ConfigError for a request that waits for a later one, or for one that is not in the load.
    """
    size = max(1, round(BLOCK_TOKENS * length_scale))
    blocks: dict[int, Int32Array] = {}
    prompts = []
    for request, last in zip(requests, _last_blocks(requests), strict=True):
        names = *request.hash_ids[:-1], last
        for name in names:
            if name not in blocks:
                source = np.random.default_rng(name)
                blocks[name] = source.integers(0, largest_id + 1, size, dtype=np.int32)
        prompt = np.concatenate([blocks[name] for name in names])
        length = max(1, round(request.input_length * length_scale))
        prompts.append(prompt[: min(length, max_prompt_tokens or length)])
    start = requests[0].timestamp if requests else 0.0
    with_sessions = any(each.session is not None for each in requests)
    outputs = [max(1, round(request.output_length * length_scale)) for request in requests]
    return Load(
        prompts,
        [min(length, max_output_tokens or length) for length in outputs],
        [(request.timestamp - start) / 1000 * time_scale for request in requests],
        stable=None if with_sessions else [len(prompt) // size * size for prompt in prompts],
        turns=_turns(requests, time_scale) if any(each.after for each in requests) else None,
        sessions=[str(each.session) for each in requests] if with_sessions else None,
        last=[each.end and each.agent == 0 for each in requests] if with_sessions else None,
    )


def _last_blocks(requests: list[TraceRequest]) -> list[int]:
    """Return, for the last block of each prompt, the hash id that gives its tokens.

    An incomplete block has a hash id of its own. If the agent's next prompt begins with this
    prompt, the block has the first tokens of the block at the same place there.
    """
    last = [request.hash_ids[-1] for request in requests]
    following: dict[tuple[int, int], int] = {}
    for index in reversed(range(len(requests))):
        request = requests[index]
        if request.session is None:
            continue
        agent = request.session, request.agent
        after = following.get(agent)
        following[agent] = index
        if after is None or requests[after].input_length < request.input_length:
            continue
        ids, place = requests[after].hash_ids, len(request.hash_ids) - 1
        if ids[:place] == request.hash_ids[:place]:
            last[index] = ids[place] if place < len(ids) - 1 else last[after]
    return last


def _turns(requests: list[TraceRequest], time_scale: float) -> list[Turn]:
    known: dict[int, int] = {}
    numbers: Counter[tuple[int | None, int]] = Counter()
    turns = []
    for index, request in enumerate(requests):
        agent = (request.session, request.agent)
        numbers[agent] += 1
        gap_s = request.gap_ms / 1000 * time_scale
        turns.append(Turn(_indices(request, known), gap_s, numbers[agent]))
        if request.id is not None:
            known[request.id] = index
    return turns


def _indices(request: TraceRequest, known: Mapping[int, int]) -> tuple[int, ...]:
    missing = [each for each in request.after if each not in known]
    if missing:
        raise ConfigError(
            f"request {request.id} of the trace waits for request {missing[0]}, which is not "
            "before it in the trace; replay the whole trace, or correct `after`"
        )
    return tuple(known[each] for each in request.after)


def hit_ratios(prompts: list[Int32Array], pages: int, page_size: int) -> dict[str, float]:
    """Return the hit ratios of an LRU cache and of an ideal cache with `pages` pages."""
    return {
        "lru_hit_ratio": lru_hit_ratio(prompts, pages, page_size),
        "ideal_hit_ratio": ideal_hit_ratio(prompts, pages, page_size),
    }


def ideal_hit_ratio(prompts: list[Int32Array], pages: int, page_size: int) -> float:
    """Return the share of prompt tokens that an ideal prefix cache with `pages` pages would hold.

    This is an upper bound for a real cache of this size. Prompts arrive one after the other, in
    this order. Each prompt is cached at once and as a whole. No outputs use pages. The cache evicts
    the page whose next use is the latest (Belady, 1966). As in the engine, hits are whole pages and
    at least one token of a prompt is computed.
    """
    chains = [page_chain(prompt, page_size) for prompt in prompts]
    uses: dict[int, list[int]] = {}
    for turn, chain in enumerate(chains):
        for page in chain:
            uses.setdefault(page, []).append(turn)
    cached: dict[int, int] = {}  # page -> its next use
    queue: list[tuple[int, int, int]] = []  # (-next use, -depth, page): the first is evicted next
    hits = 0
    for prompt, chain in zip(prompts, chains, strict=True):
        usable = (len(prompt) - 1) // page_size
        found = next((i for i, page in enumerate(chain) if page not in cached), len(chain))
        hits += min(found, usable) * page_size
        for depth, page in enumerate(chain):
            uses[page].pop(0)
            cached[page] = uses[page][0] if uses[page] else len(chains)
            heapq.heappush(queue, (-cached[page], -depth, page))
        while len(cached) > pages:
            negative, _, page = heapq.heappop(queue)
            if cached.get(page) == -negative:
                del cached[page]
    total = sum(len(prompt) for prompt in prompts)
    return hits / total if total else 0.0


def lru_hit_ratio(prompts: list[Int32Array], pages: int, page_size: int) -> float:
    """Return the share of prompt tokens that an LRU prefix cache with `pages` pages would hold.

    The cache evicts the least recently used page; of the pages of one prompt, the last one first.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        chain = page_chain(prompt, page_size)
        found = next((i for i, page in enumerate(chain) if page not in cached), len(chain))
        hits += min(found, (len(prompt) - 1) // page_size) * page_size
        for page in reversed(chain):
            cached[page] = None
            cached.move_to_end(page)
        while len(cached) > pages:
            cached.popitem(last=False)
    total = sum(len(prompt) for prompt in prompts)
    return hits / total if total else 0.0


def page_chain(prompt: Int32Array, page_size: int, before: int = 0) -> list[int]:
    """Return one number for each whole page, a hash of the page and all pages before it.

    before: the number of the page before `prompt`; 0: `prompt` is the start.
    """
    chain: list[int] = []
    for start in range(0, len(prompt) // page_size * page_size, page_size):
        before = hash((before, prompt[start : start + page_size].tobytes()))
        chain.append(before)
    return chain
