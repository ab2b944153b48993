"""Writes a synthetic trace of coding agents to stdout, in the format of minisgl.benchmark.trace.

Sessions have turns with pauses between them, and some have sub-agents. `--trace` of `minisgl bench
online`, of `minisgl bench fleet` and of `python -m bench simulate` replays the file. The timestamps
assume that an answer takes --ttft-ms plus --token-ms for each token; a replay over HTTP waits for
the answers in place of them.

Defaults follow published statistics of replayed sessions: 33 requests a session and gaps of 5.2 s
(medians; blog of vLLM, 2026-05-06, 610 traces), sub-agents in 44 % of the sessions and a cap of
256k tokens (AgentX), 94 to 95 % reusable prompt tokens, and outputs of 1.0 to 1.3 % of the prompts.
Pauses of users, shares of repositories and lengths of system prompts are assumptions. Single seeds
differ: compare at least three.
"""

import argparse
import heapq
import math
import random
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec

from minisgl.benchmark.flag_types import nonnegative_float, positive_float, positive_int
from minisgl.benchmark.trace import BLOCK_TOKENS, TraceRequest

_GAP_S, _GAP_SIGMA = 5.2, 1.18  # of tools
_HELPERS, _HELPER_SHARE = 0.44, 0.06  # sessions with sub-agents; their turns that start some
_ROOM = 4_000  # tokens below the cap at which an agent compacts its context


class _Blocks:
    """Numbers of blocks: equal contents have equal numbers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def number(self, *content: Hashable) -> int:
        return self._known.setdefault(content, len(self._known))


class _Context:
    """The prompt of one agent: parts that it shares with other agents, then tokens of its own."""

    def __init__(self, blocks: _Blocks, agent: Hashable, shared: Sequence[tuple[Hashable, int]]):
        """shared: the name of each shared part, and its end in tokens, rising."""
        self._blocks, self._agent, self._shared = blocks, agent, shared
        self._branch = 0
        self.length = shared[-1][1]

    def compact(self, summary: int) -> None:
        """Start again from the shared parts and a summary of this many tokens."""
        self._branch += 1
        self.length = self._shared[-1][1] + summary

    def hash_ids(self, request: int) -> tuple[int, ...]:
        """Return the number of each block of the prompt of this request."""
        whole = [self._block(index) for index in range(self.length // BLOCK_TOKENS)]
        rest = [self._blocks.number("tail", request)] if self.length % BLOCK_TOKENS else []
        return (*whole, *rest)

    def _block(self, index: int) -> int:
        end = (index + 1) * BLOCK_TOKENS
        part = next((i for i, (_, last) in enumerate(self._shared) if end <= last), None)
        if part is None:
            return self._blocks.number("own", self._agent, self._branch, index)
        return self._blocks.number("shared", *self._shared[: part + 1], index)


@dataclass(slots=True)
class _Agent:
    """One agent of a session. now_ms: the end of its last request, whose id is in `after`."""

    session: int
    number: int
    context: _Context
    now_ms: float
    after: tuple[int, ...] = ()


class TraceMaker:
    """Makes the requests of the options of `python -m bench trace`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._blocks = _Blocks()
        self._requests: list[TraceRequest] = []
        self._sessions = 0

    def trace(self) -> list[TraceRequest]:
        """Return the requests in order of time. A session that ends is followed by a new one."""
        options = self._options
        end_ms = options.minutes * 60e3
        starts = [self._random.uniform(0, options.ramp_s * 1e3) for _ in range(options.live)]
        heapq.heapify(starts)
        while starts:
            start_ms = heapq.heappop(starts)
            if start_ms < end_ms:
                next_ms = self._session(start_ms) + 1e3 * self._random.expovariate(1 / 20)
                heapq.heappush(starts, next_ms)
        kept = [request for request in self._requests if request.timestamp < end_ms]
        known = {request.id for request in kept}
        kept = [request for request in kept if known.issuperset(request.after)]
        kept.sort(key=lambda request: request.timestamp)
        return [msgspec.structs.replace(each, timestamp=round(each.timestamp)) for each in kept]

    def _session(self, start_ms: float) -> float:
        """Make the requests of one session, and return the time of its end."""
        number = self._sessions
        self._sessions += 1
        harness = self._random.choices((0, 1, 2), (6, 3, 1))[0]
        repository = min(int(self._random.paretovariate(0.8)), 200)
        base = 10_000 + 2_500 * harness
        shared = [
            (("harness", harness), base),
            (("repository", repository), base + 1_000 + 37 * repository % 3_000),
        ]
        main = _Agent(number, 0, _Context(self._blocks, (number, 0), shared), start_ms)
        main.context.length += self._tokens(1_500, 1.0, 50, 40_000)
        turns = self._tokens(33, 0.9, 2, 400)
        helpers, started = self._random.random() < _HELPERS, 0
        for turn in range(turns):
            last = turn == turns - 1
            self._request(main, self._pause_ms() if turn else 0.0, last)
            if helpers and not last and self._random.random() < _HELPER_SHARE:
                started += self._run_helpers(main, harness, started)
            main.context.length += self._tokens(self._options.tool, 1.25, 20, 30_000)
            if main.context.length + _ROOM > self._options.cap:
                main.context.compact(self._tokens(6_000, 0.4, 2_000, 15_000))
        return main.now_ms

    def _run_helpers(self, main: _Agent, harness: int, started: int) -> int:
        """Run some sub-agents, until all have ended. Returns their number."""
        count: int = self._random.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]
        helpers = [self._helper(main, harness, started + 1 + index) for index in range(count)]
        main.after = tuple(helper.after[0] for helper in helpers)
        main.now_ms = max(helper.now_ms for helper in helpers)
        main.context.length += 1_200 * count
        return count

    def _helper(self, main: _Agent, harness: int, number: int) -> _Agent:
        """Make the requests of a sub-agent: a prompt that such agents share, a task, some turns."""
        shared = [(("helper", harness), 6_000)]
        context = _Context(self._blocks, (main.session, number), shared)
        helper = _Agent(main.session, number, context, main.now_ms, main.after)
        context.length += self._tokens(1_500, 0.7, 100, 8_000)
        turns = self._tokens(8, 0.6, 2, 40)
        for turn in range(turns):
            pause_ms = 1e3 * self._lognormal(_GAP_S, _GAP_SIGMA, 0.1, 600) if turn else 0.0
            self._request(helper, pause_ms, last=turn == turns - 1)
            context.length += self._tokens(self._options.tool, 1.25, 20, 30_000)
            context.length = min(context.length, self._options.cap - _ROOM)
        return helper

    def _request(self, agent: _Agent, pause_ms: float, last: bool) -> None:
        """Add a request of the agent, sent after a pause."""
        options, number = self._options, len(self._requests)
        output = self._tokens(options.output, 1.0, 16, 8_000)
        agent.now_ms += pause_ms
        self._requests.append(
            TraceRequest(
                timestamp=agent.now_ms,
                input_length=agent.context.length,
                output_length=output,
                hash_ids=agent.context.hash_ids(number),
                id=number,
                after=agent.after,
                gap_ms=round(pause_ms),
                session=agent.session,
                agent=agent.number,
                end=last,
            )
        )
        agent.context.length += output
        agent.now_ms += options.ttft_ms + options.token_ms * output
        agent.after = (number,)

    def _pause_ms(self) -> float:
        options = self._options
        if self._random.random() < options.user_share:
            return 1e3 * self._lognormal(options.user_s, 1.3, 5, options.max_gap_s)
        return 1e3 * self._lognormal(_GAP_S, _GAP_SIGMA, 0.1, options.max_gap_s)

    def _lognormal(self, median: float, sigma: float, low: float, high: float) -> float:
        return min(max(self._random.lognormvariate(math.log(median), sigma), low), high)

    def _tokens(self, median: float, sigma: float, low: float, high: float) -> int:
        return int(self._lognormal(median, sigma, low, high))


def summary(requests: Sequence[TraceRequest]) -> str:
    """Return the statistics of the module's docstring. Hits are those of a cache without limit."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        chain = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        found = next((i for i, block in enumerate(chain) if block not in seen), len(chain))
        hits += min(found * BLOCK_TOKENS, request.input_length - 1)
        seen.update(chain)
    lengths = sorted(request.input_length for request in requests)
    gaps = sorted(request.gap_ms for request in requests if request.gap_ms) or [0.0]
    total, outputs = sum(lengths), sum(request.output_length for request in requests)
    return (
        f"{len(lengths)} requests, {len({request.session for request in requests})} sessions; "
        f"prompt tokens: median {lengths[len(lengths) // 2]:,}, {hits / total:.1%} reusable "
        f"(whole blocks); outputs {outputs / total:.2%} of them; "
        f"gap: median {gaps[len(gaps) // 2] / 1e3:.1f} s"
    )


def main(argv: Sequence[str]) -> int:
    """Print the trace to stdout, and its statistics to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench trace", description=__doc__)
    add = parser.add_argument
    add("--live", type=positive_int, default=48, help="sessions at a time (48)")
    add("--minutes", type=positive_float, default=60.0, help="length of the trace (60)")
    add("--seed", type=int, default=1, help="seed (1)")
    add("--cap", type=positive_int, default=262_144, help="longest context in tokens (262144)")
    add("--output", type=positive_int, default=420, help="median output tokens (420)")
    add("--tool", type=positive_int, default=1_150, help="median tokens of a tool result (1150)")
    add("--user-share", type=nonnegative_float, default=0.1, help="share of gaps of a user (0.1)")
    add("--user-s", type=positive_float, default=180.0, help="median gap of a user in s (180)")
    add("--max-gap-s", type=positive_float, default=3_600.0, help="longest gap in s (3600)")
    add("--ramp-s", type=positive_float, default=600.0, help="the sessions start within it (600)")
    add("--ttft-ms", type=nonnegative_float, default=400.0, help="assumed first token (400)")
    add("--token-ms", type=nonnegative_float, default=12.0, help="assumed time of a token (12)")
    requests = TraceMaker(parser.parse_args(argv)).trace()
    if not requests:
        parser.error("no session starts within --minutes; give more minutes or sessions")
    for request in requests:
        print(msgspec.json.encode(request).decode())
    print(summary(requests), file=sys.stderr)
    return 0
