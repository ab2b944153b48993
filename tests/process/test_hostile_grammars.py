"""Grammars and tools of a hostile key on a real server: other keys and all processes go on."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.process.harness import ServerProcess, patience, run_server, wait_for
from tests.process.test_clients import open_call, post

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("hostile: one\nother: two\n")
    flags = ("--api-key-file", str(keys), "--key-metrics", "--tool-format", "qwen3-coder")
    with run_server(*flags, "--num-pages", "2048", "--max-running-requests", "8") as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def no_process_ends(server: ServerProcess) -> Iterator[None]:
    before = server.child_pids()
    yield
    assert server.child_pids() == before


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def chat(server: ServerProcess, parameters: dict[str, Any]) -> int:
    function = {"name": "f", "parameters": parameters}
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        json={
            "model": "minisgl-demo",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 4,
        },
        headers={"authorization": "Bearer one"},
        timeout=patience(),
    )
    return answer.status_code


def works(server: ServerProcess, **body: object) -> bool:
    return post(server, "two", prompt="a", max_tokens=2, **body)[0] == 200


def test_waiting_grammars_do_not_delay_other_requests(server: ServerProcess) -> None:
    """Regression: 64 schemas of 53 bytes delayed the first token of another key by 17 s."""
    known = {"structured_outputs": {"regex": "[a-z]{2}"}}
    assert works(server, **known)
    with stopped(server.child_pid("grammars")), contextlib.ExitStack() as calls:
        for number in range(20):
            regex = {"structured_outputs": {"regex": f"[a-z]{{{number + 3}}}"}}
            calls.enter_context(open_call(server, "one", prompt="x", **regex))
        wait_for(lambda: server.metrics()["key_requests_open{key=hostile}"] == 20, "the calls")
        assert works(server)
        assert works(server, **known), "the result of the grammar is known"
    assert works(server, structured_outputs={"regex": "[0-9]"})


def test_tool_that_refers_to_itself_ends_no_process(server: ServerProcess) -> None:
    """Regression: a body of 1.5 KB occupied the tokenizer until the watchdog ended the service."""
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 40}
    assert chat(server, {"properties": {"a": again}}) in (200, 400)
    assert works(server)


def test_definitions_of_a_tool_are_not_copied_for_each_parameter(server: ServerProcess) -> None:
    """Regression: a body of 247 KB took 1.6 GB in the tokenizer."""
    definitions = {f"d{i}": {"enum": [i, "x" * 90]} for i in range(700)}
    properties = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(700)}
    pids = server.child_pids()
    before = {name: peak_bytes(pid) for name, pid in pids.items()}
    assert chat(server, {"properties": properties, "$defs": definitions}) in (200, 400)
    grown = {name: peak_bytes(pid) - before[name] for name, pid in pids.items()}
    assert max(grown.values()) < 100 * 2**20, grown
    assert works(server)


@pytest.mark.parametrize(("calls", "choices"), [(1, 1), (5, 16)])
def test_masks_that_take_long_delay_no_other_key(
    server: ServerProcess, calls: int, choices: int
) -> None:
    """Regression: a grammar of 36 bytes took up to 1.6 s for each mask and choice.

    A token of another key then took 4.9 s. The calls below would need hours.
    """
    grammar = {"structured_outputs": {"grammar": "start: e\ne: e e e | e e | /[a-z ]/"}}
    hostile = {**grammar, "n": choices, "max_tokens": 400, "ignore_eos": True, "temperature": 1}
    failed = "grammar_failures_total{reason=grammar_too_complex}"
    before = server.metrics()[failed]
    with ThreadPoolExecutor(calls) as threads:
        answers = [
            threads.submit(post, server, "one", prompt="x", seed=seed, **hostile)
            for seed in range(calls)
        ]
        for _ in range(3):
            assert works(server, temperature=0)
        wait_for(lambda: server.metrics()[failed] > before, "a choice that exceeds its work")
        assert works(server, temperature=0)
        assert {answer.result()[0] for answer in answers} <= {200, 400}
    assert works(server)


def test_legal_schema_with_long_rows_is_followed_by_16_choices(server: ServerProcess) -> None:
    properties = {f"property_{i}": {"type": "string", "maxLength": 2} for i in range(64)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    body = {"structured_outputs": {"json": schema}, "n": 16, "max_tokens": 60, "temperature": 1}
    assert post(server, "one", prompt="x", seed=1, **body)[0] == 200


def peak_bytes(pid: int) -> int:
    """The largest memory that a process has had so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def slow_grammar(number: int) -> dict[str, Any]:
    """A schema that takes 10 to 20 ms to compile. The limit is 90."""
    divisor = 4_501 + 2 * number
    return {"structured_outputs": {"json": {"type": "integer", "multipleOf": divisor}}}


def test_a_thousand_choices_do_not_delay_a_grammar_of_another_key(server: ServerProcess) -> None:
    """Regression: the other key had no token after 100 s, and each choice was compiled at once."""
    before = server.metrics()["grammar_compiles_total"]
    body = {"n": 1000, "max_tokens": 200, "ignore_eos": True, **slow_grammar(0)}
    with open_call(server, "one", prompt="x", **body):
        wait_for(lambda: server.metrics()["grammar_compiles_total"] > before + 2, "the choices")
        # This compilation waits for its turn; one of at most 5 ms takes place at the arrival.
        status, answer = post(server, "two", prompt="a", max_tokens=2, **slow_grammar(1))
        assert status == 200, answer
        # In order of arrival, the 1,000 grammars of the first key would come first.
        assert server.metrics()["grammar_compiles_total"] < before + 500
    wait_for(lambda: server.metrics()["key_requests_open{key=hostile}"] == 0, "the aborts")


def test_calls_with_grammars_that_disconnect_do_not_hold_another_key(server: ServerProcess) -> None:
    """Regression: twelve such calls kept the scheduler without a step until the service ended."""
    for number in range(1, 13):
        with open_call(server, "one", prompt="x", n=80, **slow_grammar(number)):
            wait_for(
                lambda: server.metrics()["key_requests_open{key=hostile}"] == 80, "the choices"
            )
    wait_for(lambda: server.metrics()["key_requests_open{key=hostile}"] == 0, "the aborts")
    assert works(server, structured_outputs={"regex": "[d-f]{2,9}"})
