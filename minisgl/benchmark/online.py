"""Sends a load to an OpenAI-compatible server over HTTP and measures the clients' latencies.

The load is a fixed number of open requests (--concurrency), arrivals at a rate (--rate), or the
arrivals of a trace (--trace). In a trace with sessions, a request waits for the ends of those that
it depends on, and for the pause after them. Background streams can run during the load (--beside).
All responses are streamed. With --model the benchmark starts the server itself. Defaults are in
parentheses.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from minisgl.benchmark.background_streams import (
    background_load,
    background_streams,
    summarise_streams,
)
from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.flag_types import flags, nonnegative_float, nonnegative_int, output_file
from minisgl.benchmark.latency import by_turn, error_lines, latencies, summarise, table
from minisgl.benchmark.load import add_load_flags, load_of
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.plot import plot_latencies
from minisgl.benchmark.sending import closed_loop, open_loop
from minisgl.benchmark.server_process import RunningServer, fetch, read_metrics, start_server
from minisgl.benchmark.trace import Load, Turns, hit_ratios
from minisgl.core import ConfigError
from minisgl.core.batch import Int32Array
from minisgl.utils.startup import Progress


def body_of(index: int, prompt: Int32Array, max_tokens: int, options: argparse.Namespace) -> bytes:
    """Return the JSON body of one request: a prompt of token ids, or a chat of one word per id."""
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
    if options.priority is not None:
        body["priority"] = options.priority
    if options.chat:
        words = " ".join(f"w{token_id}" for token_id in prompt.tolist())
        body["messages"] = [{"role": "user", "content": words}]
        if options.tools:
            body["tools"] = [_tool(number) for number in range(options.tools)]
            body["tool_choice"] = options.tool_choice
    else:
        body["prompt"] = prompt.tolist()
    return msgspec.json.encode(body)


def _tool(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": f"weather_{number}", "description": "The weather.", "parameters": schema}
    return {"type": "function", "function": function}


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the load against the server at `url`. Returns the summary, all requests and streams."""
    load = load_of(options)
    background = background_load(options)
    before = read_metrics(url, options.api_key)
    began_s = time.process_time()
    answers, streams = uvloop.run(_run(url, load, background, options))
    cpu_s = time.process_time() - began_s
    summary = summarise(answers) | {"client_cpu_s": cpu_s}
    if load.turns is not None:
        summary["ttft_s_by_turn"] = by_turn(answers, [turn.number for turn in load.turns])
    if streams:
        summary["beside"] = summarise_streams(background, streams, answers)
        summary["failed"] += summary["beside"]["failed"]
    print(table(summary), *error_lines([*streams, *answers]), sep="\n")
    if options.plot is not None:
        options.plot.write_text(plot_latencies(latencies(answers)), encoding="utf-8")
    after = read_metrics(url, options.api_key)
    summary |= _server_side(before, after)
    if options.trace is not None and (pages := int(after.get("minisgl_kv_cache_pages", 0))):
        page_size = int(after["minisgl_kv_cache_page_size_tokens"])
        sent = sorted(range(len(answers)), key=lambda index: answers[index].sent_s)
        summary |= hit_ratios([load.prompts[index] for index in sent], pages, page_size)
    found: dict[str, Any] = {"summary": summary}
    for name, some in (("requests", answers), ("streams", streams)):
        found[name] = [_row(answer, answers[0], options.samples) for answer in some]
    return found


def _bodies(load: Load, options: argparse.Namespace) -> list[bytes]:
    pairs = zip(load.prompts, load.max_tokens, strict=True)
    return [body_of(index, prompt, count, options) for index, (prompt, count) in enumerate(pairs)]


async def _run(
    url: str, load: Load, background: Load, options: argparse.Namespace
) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of the load and of the background streams, which end with the load."""
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    client = StreamingClient(url, path, options.api_key)
    bodies = _bodies(load, options)
    async with background_streams(client, _bodies(background, options)) as streams:
        with Progress(total=len(bodies), unit="req", disable=options.quiet) as bar:
            if load.arrivals_s is None:
                answers = await closed_loop(client, bodies, options.concurrency, bar)
            else:
                answers = await open_loop(client, bodies, Turns(load, load.arrivals_s), bar)
    client.close()
    return answers, streams


def _server_side(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Return the seconds of forward passes, the preemptions, and the seconds of the start.

    The first two are the changes since `before`. Returns {} for other servers than minisgl.
    """
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
    known = f"{', '.join(SHAPES)} (random weights), or a folder"
    add = flags(parser)
    add("--url", str, None, "URL of the server, without /v1")
    add("--model", str, None, f"start a server of this model: {known}")
    parser.add_argument("server_flags", nargs="*", help="flags of the started server, after --")
    add("--server-log", output_file, None, "file for the log of the started server")
    add("--api-key", str, None, "API key of the server")
    add("--served-name", str, None, "`model` of the requests (the first model served)")
    parser.add_argument(
        "--chat", action="store_true", help="send chats of words in place of prompts of token ids"
    )
    add("--tools", nonnegative_int, 0, "tools that each chat offers")
    add("--tool-choice", str, "auto", "use of these tools", choices=("auto", "none"))
    add("--temperature", nonnegative_float, 0.6, "sampling temperature")
    add("--priority", int, None, "priority of the requests")
    parser.add_argument("--obey-eos", action="store_true", help="let requests end at an EOS token")
    add(
        "--json",
        output_file,
        None,
        "write settings, summary, requests and background streams to this file",
    )
    parser.add_argument(
        "--samples", action="store_true", help="with --json: write the time of each event too"
    )
    add("--plot", output_file, None, "write the latencies to this file, as an SVG")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_load_flags(parser)
    return parser


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[RunningServer]:
    if (options.url is None) == (options.model is None):
        raise ConfigError("give one of --url and --model")
    if options.url is not None:
        if options.server_flags:
            raise ConfigError("flags after -- are for the server that --model starts; give --model")
        yield RunningServer(options.url.rstrip("/").removesuffix("/v1"), 0.0)
        return
    sys.stderr.write(f"starting a server of {options.model}\n")
    with start_server(options.model, options.server_flags, options.server_log) as server:
        print(f"{options.model}: ready in {server.ready_s:.1f} s")
        yield server


def _first_model(url: str, api_key: str | None) -> str:
    text = fetch(url + "/v1/models", api_key)
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models names no model; give --served-name") from None


def _vocab_size(url: str, api_key: str | None) -> int | None:
    """Return the number of token ids of the model; None if the server does not report it."""
    try:
        found = json.loads(fetch(url + "/tokenizer_info", api_key))
    except (ConfigError, ValueError):
        return None
    return found.get("vocab_size") if isinstance(found, dict) else None


def _chat_hint(error: str, vocab_size: int | None) -> str:
    """Return advice to give --chat, or "" where the token ids cannot have caused the error.

    error: of a request with a prompt of token ids. vocab_size: of the model. If it is known, the
    ids are below it.
    """
    # A server that takes text only answers 400 or 422, or fails with 500. A wrong model gives 404.
    may_be_ids = vocab_size is None and error.startswith(("HTTP 400", "HTTP 422", "HTTP 500"))
    return "; if the server does not take token ids, give --chat" if may_be_ids else ""


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON. Returns 1 when a request failed.

    Raises ConfigError when all requests failed.
    """
    options = _parser().parse_args(argv)
    with _server(options) as server:
        vocab_size = None if options.chat else _vocab_size(server.url, options.api_key)
        if vocab_size is not None and vocab_size <= options.largest_id:
            options.largest_id = vocab_size - 1
            sys.stderr.write(
                f"the model has {vocab_size} token ids, so the largest id in prompts is "
                f"{options.largest_id}; --chat sends text in place of ids\n"
            )
        if options.served_name is None:
            options.served_name = _first_model(server.url, options.api_key)
        found = measure(server.url, options)
    found["summary"]["ready_s"] = server.ready_s
    if options.json is not None:
        kept = {k: v for k, v in vars(options).items() if k != "api_key"}
        no_json = {k: str(v) for k, v in kept.items() if isinstance(v, Path) or v == math.inf}
        text = json.dumps({"settings": kept | no_json, **found}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    summary = found["summary"]
    print(json.dumps(summary))
    if summary["failed"] == summary["requests"] + summary.get("beside", {}).get("streams", 0):
        error = " ".join(found["requests"][0]["error"].split())
        hint = "" if options.chat else _chat_hint(error, vocab_size)
        raise ConfigError(f"every request failed; the first error is: {error}{hint}")
    return 1 if summary["failed"] else 0
