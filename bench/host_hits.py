"""Prefixes that come back from host memory: their first tokens, and text streams beside them.

server  A server gets prompts in rotation. Their number exceeds the KV pool, so each finds its
        prefix in host memory alone. The same prompt at once again finds it on the GPU. The
        difference of the two first tokens is the time until a host hit is ready. Its bar is 1.25
        times the time of the bytes on the link, and 2 ms. Before each of these hits a session gives
        up as many pages, so no store runs beside the load (stored_GB). Then text streams run beside
        host hits, beside as many GPU hits, and alone. There a store runs beside each load.
steps   Decode steps of an engine, without copies and with copies at all times.

A request that does not find its prompt in the expected place ends the benchmark with an error.
Flags that the benchmark does not know are flags of the server.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, repeat
from typing import NamedTuple

import uvloop

from bench.hit_requests import LEAST, STATE, STREAM_OUTPUT, STREAM_PROMPT, HitRequests
from bench.named_rows import named_rows
from bench.steps_beside_copies import PAGE_SIZE, Row, host_gb, step_rows
from minisgl.benchmark.client import Answer
from minisgl.benchmark.flag_types import add_model_flags, positive_float, positive_int
from minisgl.benchmark.floor import load_spec
from minisgl.benchmark.latency import describe, latencies
from minisgl.benchmark.server_process import start_server
from minisgl.models.spec import ModelSpec

_OUTPUT = 4  # tokens of a request: the texts of some tokens are incomplete characters


class Sizes(NamedTuple):
    """The number of prompts, and numbers of KV pages: of a prompt, the GPU pool and host memory.

    A prompt or a load takes all its pages at once. Stores keep an eighth of the pool free or copied
    (HostTier), and other evicted pages would leave the cache. So a prompt is less than an eighth.
    """

    prompts: int
    prompt: int
    pool: int
    host: int

    @classmethod
    def of(cls, prompt_tokens: int, streams: int) -> "Sizes":
        """A pool of `streams` streams and of nine prompts, and one spare prompt in host memory."""
        prompt = prompt_tokens // PAGE_SIZE
        pool = streams * (STREAM_PROMPT + STREAM_OUTPUT) // PAGE_SIZE + 9 * prompt
        prompts = -(-pool // prompt) + 1
        return cls(prompts, prompt, pool, (prompts - 9 + 2) * prompt + pool // 8)


async def fill(bench: HitRequests, sizes: Sizes, rate: float) -> Iterator[bytes]:
    """Send all prompts. Returns them in rotation: the next one is in host memory alone.

    rate: of the prompts in a second. The pages of each are stored before the next one takes them.
    Raises ConfigError.
    """
    tokens = LEAST * sizes.host * PAGE_SIZE
    states = [STATE + state for state in ("copied", "host", "moving", "free")]
    await bench.until(lambda found: sum(found[each] for each in states) >= tokens, "host memory")
    prompts = bench.bodies(sizes.prompts, sizes.prompt * PAGE_SIZE, _OUTPUT)[1]
    for _ in range(2):  # from the second time on, the cache evicts all of them in one order
        await bench.paced(prompts, rate)
    return cycle(prompts)


async def first_token_rows(
    bench: HitRequests, prompts: Iterator[bytes], pages: int, options: argparse.Namespace
) -> list[Row]:
    """Rows of first tokens. prompts: of `fill`. pages: of one. Raises ConfigError."""
    found: dict[str, list[Answer]] = {"host hit": [], "GPU hit": []}
    copied, stored = 0.0, 0.0
    for number in range(options.repeats + 1):  # the first is a warm-up
        await bench.give_up_pages(pages)
        body = next(prompts)
        for name in found:
            once = partial(bench.paced, [body], math.inf)
            answers, moved = await bench.hits(once, on_host=name == "host hit")
            if number:
                found[name] += answers
                copied += moved["to_gpu"] / options.repeats / 1e9
                stored += moved["to_host"] / options.repeats / 1e9
    first_s = {name: latencies(answers).ttft_s for name, answers in found.items()}
    rows = [_row(f"first token, {name}", describe(each)) for name, each in first_s.items()]
    ready = _row("host hit ready", describe(first_s["host hit"] - first_s["GPU hit"]))
    link_ms = 1e3 * copied / options.link_gb_s
    ready |= {"ratio": ready["p50_ms"] / link_ms, "GB": copied, "stored_GB": stored}
    return [*rows, ready | {"link_ms": link_ms, "bar_ms": 1.25 * link_ms + 2}]


async def stream_rows(
    bench: HitRequests, prompts: Iterator[bytes], options: argparse.Namespace
) -> list[Row]:
    """Rows of the streams. prompts: of `fill`. Raises ConfigError.

    ratio: of the 99th percentiles of the gaps with and without requests. to_host, to_gpu: GB/s.
    """
    rows: list[Row] = []

    async def measure(name: str, send: Callable[[], Awaitable[list[Answer]]]) -> list[Answer]:
        on_host = name == "host hits"
        gaps, answers, moved = await bench.beside_streams(options.streams, send, on_host)
        row = _row(f"gaps of {options.streams} streams, {name}", gaps)
        row |= {way: count / options.seconds / 1e9 for way, count in moved.items()}
        rows.append(row | {"per_s": len(answers) / options.seconds})
        return answers

    async def nothing() -> list[Answer]:
        await asyncio.sleep(options.seconds)
        return []

    def paced(bodies: Iterator[bytes]) -> Callable[[], Awaitable[list[Answer]]]:
        return partial(bench.paced, bodies, options.rate, options.seconds)

    answers = await measure("host hits", paced(prompts))
    body = next(prompts)
    await bench.post(body)  # the prompt is on the GPU from now on
    await measure("GPU hits", paced(repeat(body)))
    await measure("alone", nothing)
    for row in rows:
        row["ratio"] = row["p99_ms"] / rows[-1]["p99_ms"]
    first_s = latencies(answers).ttft_s
    return [*rows, _row("first token, host hit beside streams", describe(first_s))]


async def _server_rows(url: str, vocab_size: int, options: argparse.Namespace) -> list[Row]:
    bench, sizes = (
        HitRequests(url, options.model, vocab_size),
        Sizes.of(options.prompt, options.streams),
    )
    prompts = await fill(bench, sizes, options.rate / 2)  # leaves time for the stores
    rows = await first_token_rows(bench, prompts, sizes.prompt, options)
    return rows + await stream_rows(bench, prompts, options)


def _row(name: str, seconds: dict[str, float]) -> Row:
    return {"name": name} | {f"{key}_ms": 1e3 * seconds[key] for key in ("p50", "p99", "max")}


def _served(model: ModelSpec, options: argparse.Namespace, flags: list[str]) -> list[Row]:
    """Start the server, and measure it. Raises ConfigError."""
    sizes = Sizes.of(options.prompt, options.streams)
    given = {"--served-model-name": options.model, "--page-size": PAGE_SIZE}
    given |= {"--num-pages": sizes.pool, "--host-cache-gb": host_gb(model, sizes.host)}
    words = [str(word) for pair in given.items() for word in pair]
    sys.stderr.write(f"starting a server of {options.model}\n")
    with start_server(options.model, [*words, *flags]) as server:
        return uvloop.run(_server_rows(server.url, model.vocab_size, options))


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON for each part."""
    parser = argparse.ArgumentParser(prog="python -m bench host_hits", description=__doc__)
    add_model_flags(parser, "qwen3-8b")
    parts = "server", "steps"
    parser.add_argument(
        "--part", nargs="+", choices=parts, default=parts, help="parts to run (all)"
    )
    parser.add_argument(
        "--prompt", type=positive_int, default=32768, help="tokens of a prompt (32768)"
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=6, help="host hits before the streams (6)"
    )
    parser.add_argument(
        "--streams", type=positive_int, default=64, help="streams, and requests of a step (64)"
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=3.5, help="of a row of streams (3.5)"
    )
    parser.add_argument(
        "--rate", type=positive_float, default=4, help="prompts in a second at most (4)"
    )
    parser.add_argument("--steps", type=positive_int, default=600, help="steps of a row (600)")
    parser.add_argument(
        "--link-gb-s", type=positive_float, default=51.5, help="rate of the link (51.5)"
    )
    options, flags = parser.parse_known_args(argv)
    if options.prompt < PAGE_SIZE:
        parser.error(f"--prompt {options.prompt}: give a page of {PAGE_SIZE} tokens or more")
    model = load_spec(options.model)
    for part in options.part:
        if part == "steps":
            rows = step_rows(options.model, options.streams, options.steps)
        else:
            rows = _served(model, options, flags)
        print("\n".join(named_rows(part, rows)))
        print(json.dumps({"model": options.model, "part": part, "rows": rows}), flush=True)
    return 0
