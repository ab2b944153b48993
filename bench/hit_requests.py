"""`HitRequests`: requests to one server that check where their prefixes were cached."""

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable

from bench.steps_beside_copies import PAGE_SIZE
from minisgl.benchmark.background_streams import background_streams, summarise_streams
from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.latency import error_lines
from minisgl.benchmark.server_process import read_metrics
from minisgl.benchmark.trace import Load
from minisgl.benchmark.workload import LARGEST_ID, make_workload
from minisgl.core import ConfigError

STREAM_PROMPT, STREAM_OUTPUT = 128, 1024  # tokens; more than in the seconds of a row
LEAST = 0.97  # of the tokens of a prompt must come from the expected place
STATE = "minisgl_host_cache_tokens:"
_LONGEST_S = 120.0  # of a wait; the driver needs 0.3 s to lock a GB of host memory
_SCRAPE_S = 0.3  # more than the age of the metrics
_HITS = "minisgl_host_cache_hit_tokens_total"
_COPIED = "minisgl_host_cache_copied_bytes_total:"


class HitRequests:
    """Requests to one server, which check that hits are where the benchmark expects them."""

    def __init__(self, url: str, model: str, vocab_size: int) -> None:
        self._url, self._model, self._seed = url, model, 0
        self._largest = min(vocab_size - 1, LARGEST_ID)
        self.client = StreamingClient(url, "/v1/completions")

    def bodies(self, count: int, tokens: int, output: int) -> tuple[Load, list[bytes]]:
        """Return new random prompts of `tokens` tokens."""
        self._seed += 1
        lengths = (tokens,) * 2, (output,) * 2
        load = make_workload(count, *lengths, seed=self._seed, largest_id=self._largest)
        body = {"model": self._model, "temperature": 0, "max_tokens": output, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
        return load, [json.dumps({**body, "prompt": ids.tolist()}).encode() for ids in load.prompts]

    async def post(self, body: bytes) -> Answer:
        """Send a request. Raises ConfigError when it fails."""
        answer = await self.client.post(body)
        if answer.error:
            raise ConfigError("\n".join(error_lines([answer])))
        return answer

    async def metrics(self) -> dict[str, float]:
        """Return the metrics of the server, with all ended requests."""
        await asyncio.sleep(_SCRAPE_S)
        return read_metrics(self._url)

    async def until(self, is_ready: Callable[[dict[str, float]], bool], goal: str) -> None:
        """Wait until the metrics meet a condition. Raises ConfigError after _LONGEST_S.

        The scheduler announces new host memory when it has work, so each look follows a request.
        """
        began_s = time.perf_counter()
        while True:
            await self.post(self.bodies(1, 1, 1)[1][0])
            if is_ready(await self.metrics()):
                return
            if time.perf_counter() - began_s > _LONGEST_S:
                raise ConfigError(f"gave up waiting for {goal}")

    async def give_up_pages(self, pages: int) -> None:
        """Let a session leave this many pages on the GPU, which are evicted before all others."""
        _, [body] = self.bodies(1, pages * PAGE_SIZE, 1)
        name = f"ended-{self._seed}"
        await self.post(body[:-1] + f',"prompt_cache_key":"{name}"}}'.encode())
        await self.until(lambda found: not found[STATE + "moving"], "the end of a store")
        end = urllib.request.Request(f"{self._url}/v1/sessions/{name}/end", method="POST")
        response = await asyncio.to_thread(urllib.request.urlopen, end, timeout=_LONGEST_S)
        response.close()

    async def hits(
        self, send: Callable[[], Awaitable[list[Answer]]], on_host: bool
    ) -> tuple[list[Answer], dict[str, float]]:
        """Send requests that are hits. Returns their answers, and the bytes copied each way.

        on_host: their prompts are in host memory alone; else on the GPU. Raises ConfigError if they
        are not.
        """
        before = await self.metrics()
        answers = await send()
        after = await self.metrics()
        expected = sum(answer.prompt_tokens for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        loaded = after[_HITS] - before[_HITS]
        least = LEAST * expected - PAGE_SIZE * len(answers)  # the last token is computed
        if cached < least or (loaded < least if on_host else loaded):
            place = "in host memory" if on_host else "on the GPU"
            raise ConfigError(
                f"of {expected:,} prompt tokens {cached:,} were cached, {loaded:,.0f} of them in "
                f"host memory; expected all of them {place}"
            )
        ways = "to_host", "to_gpu"
        return answers, {way: after[_COPIED + way] - before[_COPIED + way] for way in ways}

    async def paced(
        self, bodies: Iterable[bytes], rate: float, seconds: float = math.inf
    ) -> list[Answer]:
        """Send requests one after the other, at most `rate` in a second, for `seconds` at most."""
        answers: list[Answer] = []
        began_s = time.perf_counter()
        for body in bodies:
            if time.perf_counter() - began_s >= seconds:
                break
            answers.append(await self.post(body))
            await asyncio.sleep(began_s + len(answers) / rate - time.perf_counter())
        return answers

    async def beside_streams(
        self, count: int, send: Callable[[], Awaitable[list[Answer]]], on_host: bool
    ) -> tuple[dict[str, float], list[Answer], dict[str, float]]:
        """Run `hits` beside streams. Returns their gaps in seconds first. Raises ConfigError."""
        load, texts = self.bodies(count, STREAM_PROMPT, STREAM_OUTPUT)
        window = Answer(0.0)

        async def timed() -> list[Answer]:
            window.sent_s = time.perf_counter()
            answers = await send()
            window.outputs_s = [time.perf_counter()]
            return answers

        async with background_streams(self.client, texts) as streams:
            answers, moved = await self.hits(timed, on_host)
        found = summarise_streams(load, streams, [window])
        if found["failed"]:
            raise ConfigError("\n".join(["a text stream ended early", *error_lines(streams)]))
        return found["itl_s"], answers, moved
