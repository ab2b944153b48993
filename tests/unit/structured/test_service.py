"""The bounded process, and hostile grammars that it accepts or refuses within its CPU time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import GrammarKind
from minisgl.demo import model_path
from minisgl.message.messages import CompileGrammar
from minisgl.structured.bounded import BoundedProcess, Bounds
from minisgl.structured.service import BOUNDS, GrammarService
from minisgl.structured.source import GrammarCompiler
from tests.patience import patience

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


def lists(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(count: int) -> dict[str, Any]:
    """By itself, this schema of 1.5 KB occupies llguidance for minutes and takes gigabytes."""
    return {"allOf": [{"type": "string", "pattern": f"a.{{{10 + i}}}"} for i in range(count)]}


def tree(depth: int) -> dict[str, Any]:
    """Each definition refers twice to the one before it: 2 ** depth paths."""
    names = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, depth)}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": {"d0": {"type": "integer"}, **names}}


def chain(count: int) -> dict[str, Any]:
    """Each definition is a list of the one before it. llguidance recurses once for each."""
    names: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, count):
        names[f"d{i}"] = {"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": names}


# Each grammar with the part of the refusal; None: it is enforced.
HOSTILE: list[tuple[GrammarKind, Any, str | None]] = [
    ("json_schema", lists(300), "nest at most 64"),
    ("regex", "(a*)*b", None),
    ("json_schema", {"enum": [f"v{i}" for i in range(10**6)]}, ""),
    ("json_schema", {"enum": [{"k": i} for i in range(9_000)]}, "to compile"),
    ("choice", json.dumps([f"v{i}" for i in range(10**6)]), "at most 262144"),
    ("regex", ".{100000}", None),
    ("regex", "((a{1,100}){1,100}){1,100}", None),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
    ("json_schema", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, None),
    ("regex", "(a|b)" * 13_107, None),
    ("regex", "(a|b)*a(a|b){30}", None),
    ("json_schema", patterns(30), "to compile"),
    ("json_schema", tree(30), None),
    ("json_schema", {"properties": {f"p{i}": True for i in range(9_000)}}, "to compile"),
    ("json_schema", {"type": "array", "minItems": 10**9}, None),
    ("json_schema", {"type": "string", "maxLength": 10**9}, None),
    ("grammar", "(" * 5_000, "neither valid Lark nor valid GBNF"),
    ("json_schema", {"minimum": 10**400}, "a number has more than 300 digits"),
    ("json_schema", {"default": -(10**400)}, "a number has more than 300 digits"),
    ("json_schema", '{"default": NaN}', "the schema is not JSON"),
    ("json_schema", chain(300), "refers too deeply"),
    ("grammar", "", "No 'root' rule found"),
    ("grammar", "root ::= b", "Rule 'b' not found"),
    ("grammar", 'root ::= "\\', "neither valid Lark nor valid GBNF"),
    ("grammar", 'root ::= "a"{\u00b2}', "neither valid Lark nor valid GBNF"),
    ("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000, ""),
    ("grammar", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, "nested too deeply"),
    ("grammar", 'start: s\ns: s s s | "a" | ""', None),
]


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    service = GrammarService(str(model_path()), (7, 8))
    yield service
    service.close()


def request(kind: GrammarKind, value: Any) -> CompileGrammar:
    text = value if isinstance(value, str) else json.dumps(value)
    return CompileGrammar(uid=5, kind=kind, text=text)


@pytest.mark.parametrize(("kind", "value", "refusal"), HOSTILE)
def test_hostile_grammar_is_enforced_or_refused(
    service: GrammarService, kind: GrammarKind, value: Any, refusal: str | None
) -> None:
    result = service.compile(request(kind, value))
    if refusal is None:
        assert result.error is None
        assert result.source
    else:
        assert result.error is not None
        assert refusal in result.error
    assert (result.uid, result.internal) == (5, False)
    assert service.compile(request("regex", "[0-9]+")).error is None, "the next grammar compiles"


def test_error_of_the_compiler_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GrammarCompiler, "check", lambda self, request: 1 // 0)
    broken = GrammarService(str(model_path()), (7, 8))
    for _ in range(2):
        result = broken.compile(request("regex", "a"))
        assert (result.error, result.internal) == ("the grammar could not be checked", True)
        assert "ZeroDivisionError" in caplog.text, "the log has the traceback"
    broken.close()


def test_result_has_the_ids_of_thinking(service: GrammarService) -> None:
    assert service.compile(request("regex", "a")).think_ids == (7, 8)


def test_model_without_a_usable_tokenizer_refuses_by_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    service = GrammarService(str(tmp_path), (7, 8))
    assert "does not support structured output" in str(service.compile(request("regex", "a")).error)


FREE = Bounds(cpu_s=10.0, memory_bytes=2**30)


def spin(raw: bytes) -> bytes:
    """Work for as many seconds of CPU time as the text says, then return the process id."""
    end_s = time.process_time() + float(raw)
    while time.process_time() < end_s:
        pass
    return str(os.getpid()).encode()


def test_call_over_its_cpu_time_is_ended_and_the_next_one_works() -> None:
    process = BoundedProcess(spin, Bounds(0.1, 2**30))
    first = process.call(b"0")
    assert process.call(b"0") == first, "one process serves all calls"
    assert process.call(b"60") is None
    second = process.call(b"0")
    assert second is not None
    assert second != first
    process.close()


def test_limit_holds_for_each_call_and_not_for_their_sum() -> None:
    process = BoundedProcess(spin, BOUNDS)
    assert len({process.call(b"0.03") for _ in range(8)}) == 1
    process.close()


def hold(raw: bytes) -> bytes:
    """Take as much memory as the text says, and return the process id."""
    bytearray(int(raw))
    return str(os.getpid()).encode()


def test_call_over_its_memory_is_ended_and_the_next_one_works() -> None:
    process = BoundedProcess(hold, Bounds(10.0, 2**26))
    first = process.call(b"1000")
    assert process.call(b"30000000") == first
    assert process.call(b"100000000") is None
    second = process.call(b"30000000")
    assert second not in (None, first)
    process.close()


def test_memory_that_past_calls_keep_is_not_missing_in_later_calls() -> None:
    kept: list[bytearray] = []
    process = BoundedProcess(
        lambda raw: kept.append(bytearray(int(raw))) or b"x", Bounds(10, 2**27)
    )
    assert [process.call(b"20000000") for _ in range(20)] == [b"x"] * 20
    process.close()


def test_death_of_an_idle_process_does_not_shift_the_replies() -> None:
    """Regression: each later call got the reply of the call before it."""
    process = BoundedProcess(lambda raw: raw + b" " + str(os.getpid()).encode(), FREE)
    reply = process.call(b"first")
    for text in (b"second", b"third"):
        assert reply is not None
        os.kill(int(reply.split()[1]), signal.SIGKILL)
        reply = process.call(text)
        # None: the process ended after its parent had passed the request on.
        assert reply is None or reply.startswith(text)
        reply = process.call(text)
        assert reply is not None
        assert reply.startswith(text)
    process.close()


def test_reply_of_an_interrupted_call_is_dropped() -> None:
    process = BoundedProcess(lambda raw: raw * 2, FREE)
    process._pipe.send_bytes(bytes(8) + b"interrupted")
    assert process.call(b"next") == b"nextnext"
    process.close()


def test_large_requests_and_replies_pass() -> None:
    process = BoundedProcess(lambda raw: raw * 2, FREE)
    assert process.call(b"x" * 2**20) == b"x" * 2**21
    process.close()


def test_processes_end_with_their_owner() -> None:
    process = BoundedProcess(lambda _: f"{os.getpid()} {os.getppid()}".encode(), FREE)
    reply = process.call(b"x")
    assert reply is not None
    worker, parent = map(int, reply.split())
    process.close()
    assert os.waitpid(parent, 0)[1] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_failure_of_the_process_is_an_error_of_the_owner(capfd: pytest.CaptureFixture[str]) -> None:
    process = BoundedProcess(lambda raw: bytes(raw[9:10].hex(), "x"), FREE)  # LookupError
    with pytest.raises(EOFError, match="the process for grammars has ended"):
        process.call(b"x")
    process.close()
    assert "LookupError" in capfd.readouterr().err


_NO_FORK = """
import os, sys
from minisgl.structured.bounded import BoundedProcess, Bounds
fork, owner, forks = os.fork, os.getpid(), int(sys.argv[1])

def limited() -> int:
    global forks
    if os.getpid() != owner:
        if not forks:
            raise BlockingIOError("the limit of processes is reached")
        forks -= 1
    return fork()

os.fork = limited
try:
    process = BoundedProcess(lambda raw: str(os.getpid()).encode(), Bounds(10.0, 2**30))
    while reply := process.call(b"x"):
        os.kill(int(reply), 9)
    process.call(b"x")
except EOFError as error:
    print(error)
finally:
    print("the owner")
"""


@pytest.mark.parametrize("forks", [0, 1])
def test_failed_fork_is_an_error_of_the_owner_alone(forks: int) -> None:
    """Regression: the fork that failed went on with the code of its owner."""
    command = [sys.executable, "-c", _NO_FORK, str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience())
    lines = done.stdout.splitlines()
    assert (len(lines), lines[-1]) == (2, "the owner"), done.stdout + done.stderr
    assert lines[0].startswith("the process for grammars has ended")
    assert done.stderr.count("BlockingIOError: the limit of processes is reached") == 1
