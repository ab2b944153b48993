"""Images beside text: first tokens, the gaps of text streams, and the time of the image encoder.

Without --encoder a server runs, and for each side the benchmark measures:

1. The time to first token (TTFT) of new images, of the same images again, whose tokens the prefix
   cache holds, and of texts with as many tokens. The first image of a server has its own row.
2. The inter-token latency (ITL) of text streams, without images and beside new images.

With --encoder only the image encoder runs, with random weights. Its floor is the time of its
operations, or that of the bytes of its weights if this is longer. Flags that the benchmark does not
know are flags of the server.
"""

import argparse
import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import uvloop
from PIL import Image

from bench.named_rows import named_rows
from minisgl.benchmark.background_streams import background_streams, summarise_streams
from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.flag_types import add_model_flags, positive_float, positive_int
from minisgl.benchmark.floor import load_spec
from minisgl.benchmark.latency import describe, error_lines, latencies
from minisgl.benchmark.load import arrivals
from minisgl.benchmark.sending import open_loop
from minisgl.benchmark.server_process import read_metrics, start_server
from minisgl.benchmark.trace import Turns
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError
from minisgl.cost.floor import Ceilings
from minisgl.images.spec import CHANNELS
from minisgl.models.encoder import ImageEncoder
from minisgl.models.encoder_spec import EncoderSpec
from minisgl.models.loader import materialise
from minisgl.utils.startup import Progress

_REPEATS = 3  # images of each side whose first tokens are measured
_OUTPUT_TOKENS = 8  # of a request with an image
_STREAM_PROMPT, _STREAM_OUTPUT = 128, 8192  # tokens; more than in _SECONDS
_SECONDS = 8.0  # of the streams, with and without images
_WARM_UP, _RUNS = 3, 10  # of the encoder
Row = dict[str, Any]  # name, and the figures in milliseconds


class Bench:
    """Requests to one server. Each image is new, unless its row says otherwise."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._seed = model, 0
        self._chats = StreamingClient(url, "/v1/chat/completions")
        self._texts = StreamingClient(url, "/v1/completions")

    def _body(self, given: dict[str, Any], tokens: int) -> bytes:
        stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"model": self._model, "temperature": 0, "max_tokens": tokens, **stream, **given}
        return json.dumps(body).encode()

    def _image(self, side: int) -> bytes:
        """Return a chat with a new JPEG of side x side pixels, and a question."""
        self._seed += 1
        small = np.random.default_rng(self._seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        picture = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        picture.save(buffer, "JPEG", quality=85)
        url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        question = {"type": "text", "text": "describe the picture "}
        content = [{"type": "image_url", "image_url": {"url": url}}, question]
        return self._body({"messages": [{"role": "user", "content": content}]}, _OUTPUT_TOKENS)

    async def first_tokens(self, side: int) -> list[Row]:
        """Rows of comparison 1. Raises ConfigError when a request fails."""
        first = await self._chats.post(self._image(side))
        new, again, texts = [], [], []
        for seed in range(_REPEATS):
            body = self._image(side)
            new.append(await self._chats.post(body))
            again.append(await self._chats.post(body))
            lengths = (new[-1].prompt_tokens,) * 2
            prompt = make_workload(1, lengths, seed=side + seed).prompts[0].tolist()
            texts.append(await self._texts.post(self._body({"prompt": prompt}, _OUTPUT_TOKENS)))
        answers = {"first image": [first], "new image": new, "same image": again, "text": texts}
        return [_first_token_row(f"{name}, {side}", found) for name, found in answers.items()]

    async def streams(self, num_streams: int) -> list[Row]:
        """The row of comparison 2 without images. Raises ConfigError when a request fails."""
        alone, _ = await self._streams([], num_streams, 1.0)
        return [{"name": f"ITL, {num_streams} streams", **alone}]

    async def beside(self, side: int, num_streams: int, rate: float, alone: Row) -> list[Row]:
        """Rows of comparison 2 with images. alone: the row without. Raises as `streams`.

        ratio: of the 99th percentiles with and without images.
        """
        bodies = [self._image(side) for _ in range(max(round(_SECONDS * rate), 1))]
        beside, images = await self._streams(bodies, num_streams, rate)
        name = f"ITL, beside {rate:g} images a second, {side}"
        return [
            {"name": name, **beside, "ratio": beside["p99_ms"] / alone["p99_ms"]},
            _first_token_row(f"image beside streams, {side}", images),
        ]

    async def _streams(
        self, bodies: Sequence[bytes], num_streams: int, rate: float
    ) -> tuple[dict[str, float], list[Answer]]:
        """Return the ITL of streams while images are sent, and the answers of these."""
        lengths = ((_STREAM_PROMPT,) * 2, (_STREAM_OUTPUT,) * 2)
        load = make_workload(num_streams, *lengths, seed=self._seed)
        texts = [self._body({"prompt": ids.tolist()}, _STREAM_OUTPUT) for ids in load.prompts]
        due_s = arrivals(len(bodies), rate, poisson=False, seed=0)
        async with background_streams(self._texts, texts) as streams:
            window = Answer(time.perf_counter())
            with Progress(total=len(bodies), desc="images") as bar:
                sending = open_loop(self._chats, bodies, Turns(load, due_s), bar)
                answers, _ = await asyncio.gather(sending, asyncio.sleep(_SECONDS))
            window.outputs_s = [time.perf_counter()]
        found = summarise_streams(load, streams, [window])
        if found["failed"]:
            raise ConfigError("\n".join(["a text stream ended early", *error_lines(streams)]))
        return _milliseconds(found["itl_s"]), answers


def _first_token_row(name: str, answers: Sequence[Answer]) -> Row:
    if any(answer.error for answer in answers):
        raise ConfigError("\n".join([f"{name}: a request failed", *error_lines(answers)]))
    tokens = {"tokens": answers[0].prompt_tokens, "cached": answers[0].cached_tokens}
    return {"name": f"TTFT, {name}", **tokens, **_milliseconds(describe(latencies(answers).ttft_s))}


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name}_ms": 1e3 * seconds[name] for name in ("p50", "p99", "max") if seconds}


async def _measure(url: str, options: argparse.Namespace) -> list[Row]:
    bench = Bench(url, options.model)
    rows = [row for side in options.side for row in await bench.first_tokens(side)]
    found = read_metrics(url)
    decode_s = found["minisgl_image_decode_seconds_total"] / found["minisgl_images_total"]
    rows.append({"name": "decoding of an image, mean", "ms": 1e3 * decode_s})
    rows += await bench.streams(options.streams)
    load = options.streams, options.rate, rows[-1]
    return rows + [row for side in options.side for row in await bench.beside(side, *load)]


def encoder_rows(spec: EncoderSpec, sides: Sequence[int], device: torch.device) -> Iterator[Row]:
    """Time encodings of square images one after the other, in bf16. Raises ConfigError.

    host_ms: until the host has queued the work of an encoding; on a CPU the same as the time.
    """
    with torch.device("meta"):
        encoder = ImageEncoder(spec)
    materialise(encoder, device, torch.bfloat16)
    for parameter in encoder.parameters():
        parameter.normal_(0.0, 0.02)  # zeros would take less power, and so less time
    unit, ceilings = spec.patch * spec.merge, Ceilings()
    for side in sides:
        if side % unit:
            raise ConfigError(f"--side {side} must be a multiple of {unit} with --encoder")
        pixels = torch.randint(0, 256, (side, side, CHANNELS), dtype=torch.uint8, device=device)
        _encode(encoder, pixels, _WARM_UP)
        seconds, host_s = _encode(encoder, pixels, _RUNS)
        work_s = ceilings.arithmetic_s(spec.flops((side // spec.patch,) * 2), 0)
        floor_s = max(work_s, 2 * spec.weights / ceilings.bytes_per_s)
        times = {"ms": 1e3 * seconds, "host_ms": 1e3 * host_s, "floor_ms": 1e3 * floor_s}
        yield {"name": f"encoder, {side}", **times, "ratio": seconds / floor_s}


def _encode(encoder: ImageEncoder, pixels: torch.Tensor, runs: int) -> tuple[float, float]:
    """Return the seconds of an encoding, and those until the host has queued it."""
    _wait(pixels.device)
    began_s = time.perf_counter()
    for _ in range(runs):
        encoder.encode(pixels)
    host_s = time.perf_counter() - began_s
    _wait(pixels.device)
    return (time.perf_counter() - began_s) / runs, host_s / runs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _encoder(options: argparse.Namespace) -> list[Row]:
    model = load_spec(options.model, images=True)
    if model.encoder is None:
        raise ConfigError(f"{options.model} has no image encoder; give a model with images")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        return [*encoder_rows(model.encoder, options.side, device)]


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench images", description=__doc__)
    add_model_flags(parser, "qwen3.5-9b-images")
    parser.add_argument(
        "--side", type=positive_int, nargs="+", default=[1024], help="pixels of a side (1024)"
    )
    parser.add_argument("--streams", type=positive_int, default=64, help="text streams (64)")
    parser.add_argument("--rate", type=positive_float, default=5, help="images per second (5)")
    parser.add_argument("--encoder", action="store_true", help="time the image encoder alone")
    options, flags = parser.parse_known_args(argv)
    if options.encoder:
        if flags:
            parser.error(f"unknown flags: {' '.join(flags)}; with --encoder no server runs")
        rows = _encoder(options)
    else:
        sys.stderr.write(f"starting a server of {options.model}\n")
        with start_server(options.model, ["--served-model-name", options.model, *flags]) as server:
            rows = uvloop.run(_measure(server.url, options))
    print("\n".join(named_rows(options.model, rows)))
    print(json.dumps({"model": options.model, "rows": rows}))
    return 0
