"""The part of `python -m bench attack` with two keys: how long does one key delay another?

The second key sends requests one after the other, first alone and then beside the calls of the
first key. A process of its own sends the calls of the first key.
"""

import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.core import ConfigError

_ATTACKER, _OTHER = "key-of-the-attacker", "key-of-another-client"
_PATH = "/v1/chat/completions"
_START_S = 2.0  # until the calls of the attack are open
_PATIENCE_S = 30.0  # for the first token of one request
_WARM_UP = 5  # requests before the first measured one
_MAX_MISSED = 3  # requests without a first token; a row ends after so many of them
_QUESTION: tuple[dict[str, str], ...] = ({"role": "user", "content": "Spell the word planet."},)

Body = dict[str, Any]


class KeyAttack(NamedTuple):
    """Calls of one key.

    body     returns the fields of the call with this number, besides model and messages.
    calls    number of calls that are open at once. A new call follows an ended one.
    open_s   a client disconnects after this time; None: it reads its answer to the end.
    other    fields of the requests of the second key, besides model and messages.
    flags    flags of the server.
    """

    body: Callable[[int], Body]
    calls: int
    open_s: float | None = None
    other: Body = {}
    flags: tuple[str, ...] = ()


class KeyFound(NamedTuple):
    """The times of an attack. The time of a request without a first token is inf.

    alone_p95_ms, beside_p95_ms  time to the first token of the second key's requests: alone, and
                                 beside the attack.
    step_ms                      median time between two tokens of these requests beside the attack;
                                 0 if no request had two tokens.
    """

    alone_p95_ms: float
    beside_p95_ms: float
    step_ms: float

    @property
    def bar_ms(self) -> float:
        """The largest time that the server promises beside other clients."""
        return 2 * self.alone_p95_ms + self.step_ms


def _required(parameters: Body) -> Body:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _self_references(number: int) -> Body:
    """A tool whose parameter refers to itself 40 times."""
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 40}
    return _required({"properties": {"a": again}, "title": str(number)})


def _shared_definitions(number: int) -> Body:
    """700 parameters and 0.09 MB of definitions, within the 131,072 characters of the model."""
    definitions = {f"d{i}": {"enum": [i, f"{number}" + "x" * 90]} for i in range(700)}
    properties = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(700)}
    return _required({"properties": properties, "$defs": definitions})


def _slow_schema(number: int) -> Body:
    """A schema of 40 bytes that takes about 50 ms to compile, and differs from all others."""
    schema = {"type": "integer", "multipleOf": 9_000 + number % 1_000}
    return {"structured_outputs": {"json": schema}, "max_tokens": 4}


def _ambiguous_grammar(choices: int) -> Callable[[int], Body]:
    """Returns calls with a grammar of 36 bytes, whose masks take longer with each token."""
    grammar = "start: e\ne: e e e | e e | /[a-z ]/"
    body = {"structured_outputs": {"grammar": grammar}, "n": choices, "max_tokens": 200}
    return lambda number: {**body, "temperature": 1.0, "ignore_eos": True, "seed": number}


def _many_properties(number: int) -> Body:
    """A legal schema: 64 strings, all of them optional."""
    properties = {f"property_{i}": {"type": "string"} for i in range(64)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"structured_outputs": {"json": schema}, "n": 16, "max_tokens": 200, "seed": number}


_STRUCTURED: Body = {"structured_outputs": {"regex": "[a-z]{4,40}"}}
_CODER = ("--tool-format", "qwen3-coder")

KEY_ATTACKS = MappingProxyType(
    {
        "tool schema that refers to itself": KeyAttack(_self_references, 4, flags=_CODER),
        "definitions of a tool schema": KeyAttack(_shared_definitions, 4, flags=_CODER),
        "1,000 choices with a grammar": KeyAttack(
            lambda number: {**_slow_schema(number), "n": 1000}, 1, other=_STRUCTURED
        ),
        "calls with a grammar that disconnect": KeyAttack(
            lambda number: {**_slow_schema(number), "n": 100}, 12, open_s=0.5, other=_STRUCTURED
        ),
        "different small schemas": KeyAttack(_slow_schema, 64),
        "ambiguous grammar": KeyAttack(_ambiguous_grammar(1), 1),
        "ambiguous grammar, 16 choices": KeyAttack(_ambiguous_grammar(16), 1),
        "ambiguous grammar, 80 rows": KeyAttack(_ambiguous_grammar(16), 5),
        "a legal schema of 64 strings, 16 choices": KeyAttack(_many_properties, 1),
    }
)


def key_flags(folder: Path) -> list[str]:
    """Write a file with both keys, and return the flags of a server that uses it."""
    path = folder / "keys"
    path.write_text(f"attacker: {_ATTACKER}\nother: {_OTHER}\n")
    return ["--api-key-file", str(path)]


def measure_keys(url: str, model: str, name: str, requests: int) -> KeyFound:
    """Send requests of the second key alone, and beside the attack with this name.

    model: the served name. Raises ConfigError if the server refuses the requests.
    """
    attack = KEY_ATTACKS[name]
    return asyncio.run(_measure(url, model, name, attack, requests))


async def _measure(url: str, model: str, name: str, attack: KeyAttack, requests: int) -> KeyFound:
    client = StreamingClient(url, _PATH, _OTHER)
    fields = {"max_tokens": 8, "ignore_eos": True, "stream": True, **attack.other}
    body = _encoded(model, fields)
    for _ in range(_WARM_UP):
        if (error := (await client.post(body)).error) is not None:
            raise ConfigError(f"a request of the second key failed: {error}")
    alone, _ = await _first_tokens(client, body, requests)
    with _running(url, model, name):
        await asyncio.sleep(_START_S)
        beside, gaps = await _first_tokens(client, body, requests)
    client.close()
    step = statistics.median(gaps) if gaps else 0.0
    return KeyFound(_p95(alone) * 1e3, _p95(beside) * 1e3, step * 1e3)


async def _first_tokens(
    client: StreamingClient, body: bytes, requests: int
) -> tuple[list[float], list[float]]:
    """Send requests in turn. Returns the seconds to first tokens, and those between two tokens."""
    firsts: list[float] = []
    gaps: list[float] = []
    for _ in range(requests):
        answer = Answer(time.perf_counter())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.post(body, answer), _PATIENCE_S)
        outputs_s = answer.outputs_s
        firsts.append(outputs_s[0] - answer.sent_s if outputs_s else math.inf)
        gaps += [after - before for before, after in itertools.pairwise(outputs_s)]
        if firsts.count(math.inf) == _MAX_MISSED:
            break
    return firsts, gaps


def _p95(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.95 * len(times)) - 1]


def _encoded(model: str, fields: Body) -> bytes:
    return json.dumps({"model": model, "messages": _QUESTION, **fields}).encode()


@contextlib.contextmanager
def _running(url: str, model: str, name: str) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_attack, args=(url, model, name), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _attack(url: str, model: str, name: str) -> None:
    asyncio.run(_send_calls(url, model, KEY_ATTACKS[name]))


async def _send_calls(url: str, model: str, attack: KeyAttack) -> None:
    client = StreamingClient(url, _PATH, _ATTACKER)
    numbers = itertools.count()

    async def call_again_and_again() -> None:
        while True:
            body = _encoded(model, {"stream": True, **attack.body(next(numbers))})
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(client.post(body), attack.open_s)
                if answer.error is not None:
                    await asyncio.sleep(0.01)  # a refused call

    await asyncio.gather(*(call_again_and_again() for _ in range(attack.calls)))
