"""Load on an OpenAI-compatible server over HTTP, and what its clients felt.

Loads: a fixed number of requests at a time (--concurrency), arrivals at a rate (--rate), or a
trace's own arrivals (--trace), with streams beside them (--beside). Every answer streams. With
--model it starts the server itself.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from minisgl.benchmark.beside import running, streams_of, summarise_streams
from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.flags import amount, output_file
from minisgl.benchmark.latency import error_lines, latencies, summarise, table
from minisgl.benchmark.load import add_load_flags, load_of
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.own_server import OwnServer, fetch, own_server, read_metrics
from minisgl.benchmark.plot import plot_latencies
from minisgl.benchmark.trace import Load, hit_ratios
from minisgl.core import ConfigError, Int32Array


async def closed_loop(
    client: StreamingClient, bodies: Sequence[bytes], concurrency: int, bar: tqdm
) -> list[Answer]:
    """Answers in the order of `bodies`, of which `concurrency` are under way at a time."""
    answers: list[Answer | None] = [None] * len(bodies)
    turns = iter(range(len(bodies)))

    async def work() -> None:
        for turn in turns:
            answers[turn] = await client.post(bodies[turn])
            bar.update()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answer for answer in answers if answer is not None]


async def open_loop(
    client: StreamingClient, bodies: Sequence[bytes], arrivals_s: Sequence[float], bar: tqdm
) -> list[Answer]:
    """Answers in the order of `bodies`, each sent when its time has come, whatever else runs."""
    begin_s = time.perf_counter()

    async def work(body: bytes, due_s: float) -> Answer:
        await asyncio.sleep(begin_s + due_s - time.perf_counter())
        answer = await client.post(body)
        bar.update()
        return answer

    pairs = zip(bodies, arrivals_s, strict=True)
    return list(await asyncio.gather(*(work(body, due_s) for body, due_s in pairs)))


def body_of(index: int, prompt: Int32Array, max_tokens: int, options: argparse.Namespace) -> bytes:
    """The JSON of one request: ids as they are, or for a chat a word for each id."""
    body: dict[str, Any] = {
        "model": options.served_name,
        "max_tokens": max_tokens,
        "temperature": options.temperature,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not options.obey_eos:
        body["ignore_eos"] = True
    if options.chat:
        words = " ".join(f"w{token_id}" for token_id in prompt.tolist())
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = prompt.tolist()
    return msgspec.json.encode(body)


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the load that the options describe against `url`: the summary and all requests."""
    load, beside = load_of(options), streams_of(options)
    before = read_metrics(url, options.api_key)
    began_s = time.process_time()
    answers, streams = uvloop.run(_run(url, load, beside, options))
    cpu_s = time.process_time() - began_s
    summary = summarise(answers) | {"client_cpu_s": cpu_s}
    if streams:
        summary["beside"] = summarise_streams(beside, streams, answers)
        summary["failed"] += summary["beside"]["failed"]
    print(table(summary), *error_lines([*streams, *answers]), sep="\n")
    if options.plot is not None:
        options.plot.write_text(plot_latencies(latencies(answers)), encoding="utf-8")
    after = read_metrics(url, options.api_key)
    summary |= _server_side(before, after)
    if options.trace is not None and (pages := int(after.get("minisgl_kv_cache_pages", 0))):
        page_size = int(after["minisgl_kv_cache_page_size_tokens"])
        summary |= hit_ratios(load.prompts, pages, page_size)
    rows = [_row(answer, answers[0], options.samples) for answer in answers]
    return {"summary": summary, "requests": rows}


def _bodies(load: Load, options: argparse.Namespace) -> list[bytes]:
    pairs = zip(load.prompts, load.max_tokens, strict=True)
    return [body_of(index, prompt, most, options) for index, (prompt, most) in enumerate(pairs)]


async def _run(
    url: str, load: Load, beside: Load, options: argparse.Namespace
) -> tuple[list[Answer], list[Answer]]:
    """The answers to the load, and the streams beside it as they were at its end."""
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    client, bodies = StreamingClient(url, path, options.api_key), _bodies(load, options)
    gc.collect()
    gc.disable()  # a collection would stand in the latencies
    async with running(client, _bodies(beside, options)) as streams:
        with tqdm(total=len(bodies), unit="req", disable=options.quiet) as bar:
            if load.arrivals_s is None:
                answers = await closed_loop(client, bodies, options.concurrency, bar)
            else:
                answers = await open_loop(client, bodies, load.arrivals_s, bar)
    gc.enable()
    client.close()
    return answers, streams


def _server_side(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Of a minisgl server: what changed in its counters of forward passes and preemptions."""
    counted = ("minisgl_forward_seconds_total", "minisgl_preemptions_total")
    changed = {k: v - before.get(k, 0.0) for k, v in after.items() if k.startswith(counted)}
    startup = {k: v for k, v in after.items() if k.startswith("minisgl_startup_seconds")}
    return {"server": changed | startup} if after else {}


def _row(answer: Answer, first: Answer, samples: bool) -> dict[str, Any]:
    outputs_s = answer.outputs_s or [answer.sent_s]
    times = {"outputs_s": [at_s - first.sent_s for at_s in outputs_s]} if samples else {}
    return times | {
        "sent_s": answer.sent_s - first.sent_s,
        "ttft_s": outputs_s[0] - answer.sent_s,
        "e2e_s": outputs_s[-1] - answer.sent_s,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "error": answer.error,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minisgl bench online", description=__doc__)
    parser.add_argument("--url", help="of the server, without /v1")
    parser.add_argument(
        "--model", help=f"start a server of {', '.join(SHAPES)} (random weights), or of a folder"
    )
    parser.add_argument("server_flags", nargs="*", help="after --: flags for that server")
    parser.add_argument("--server-log", type=output_file, help="where that server's log is kept")
    parser.add_argument("--api-key")
    parser.add_argument("--served-name", help="the `model` of requests; none: the first served")
    parser.add_argument("--chat", action="store_true", help="chats of words, not prompts of ids")
    parser.add_argument("--temperature", type=amount, default=0.6)
    parser.add_argument("--obey-eos", action="store_true", help="answers may end early")
    parser.add_argument("--json", type=output_file, help="write settings, summary and requests")
    parser.add_argument("--samples", action="store_true", help="with the time of each output")
    parser.add_argument("--plot", type=output_file, help="write the latencies as an SVG")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_load_flags(parser)
    return parser


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[OwnServer]:
    if (options.url is None) == (options.model is None):
        raise ConfigError("give either --url or --model")
    if options.url is not None:
        if options.server_flags:
            raise ConfigError("flags after -- are for a server of --model")
        yield OwnServer(options.url.rstrip("/").removesuffix("/v1"), 0.0)
        return
    with own_server(options.model, options.server_flags, options.server_log) as server:
        print(f"{options.model}: ready in {server.ready_s:.1f} s")
        yield server


def _first_model(url: str, api_key: str | None) -> str:
    text = fetch(url + "/v1/models", api_key)
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models names no model; give --served-name") from None


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON; 1 when a request failed."""
    options = _parser().parse_args(argv)
    with _server(options) as server:
        if options.served_name is None:
            options.served_name = _first_model(server.url, options.api_key)
        found = measure(server.url, options)
    found["summary"]["ready_s"] = server.ready_s
    if options.json is not None:
        kept = {k: v for k, v in vars(options).items() if k != "api_key"}
        no_json = {k: str(v) for k, v in kept.items() if isinstance(v, Path) or v == math.inf}
        text = json.dumps({"settings": kept | no_json, **found}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    print(json.dumps(found["summary"]))
    return 1 if found["summary"]["failed"] else 0
