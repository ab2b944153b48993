"""If one process dies, all end within seconds, and one line names the process."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.patience import patience
from tests.process.harness import (
    ServerProcess,
    Stream,
    assert_told,
    run_server,
    start_long_stream,
    wait_for,
)

pytestmark = pytest.mark.process

CHILDREN = ["api", "scheduler", "tokenizer-0", "detokenizer", "grammars"]


DRAIN = ("--drain-grace", "600", "--drain-timeout", "600")


def _bring_into(server: ServerProcess, phase: str) -> Stream | None:
    """Wait for this phase. Returns the stream that runs in it, if any.

    starting: the processes exist; a real engine may become ready at any time.
    """
    if phase == "starting":
        return None
    if phase == "loading":
        wait_for(lambda: server.status("/livez") == 200, "livez while loading")
        assert server.status("/readyz") == 503
        return None
    server.wait_ready()
    stream = start_long_stream(server) if phase in ("decode", "draining") else None
    if phase == "draining":
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.status("/readyz") == 503, "unreadiness")
    return stream


def _assert_told(stream: Stream | None, lost: bool) -> None:
    if stream is not None:
        assert_told(stream, lost)


def _assert_all_gone(pids: list[int]) -> None:
    def alive() -> list[int]:
        return [
            pid
            for pid in pids
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]

    wait_for(lambda: not alive(), f"the end of {pids}")


def _assert_ends_when_killed(server: ServerProcess, name: str, phase: str) -> None:
    stream = _bring_into(server, phase)
    pids = [server.child_pid(child) for child in CHILDREN]
    psutil.Process(server.child_pid(name)).kill()
    assert server.wait_exit() == 1
    _assert_all_gone(pids)
    last_line = server.stderr.splitlines()[-1]
    assert f"error: {name} (pid" in last_line
    assert "SIGKILL" in last_line
    _assert_told(stream, lost=name == "api")


# Each process ends here in some phase, and while the service is idle. The scheduler is a stub.
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("api", "loading"),
        ("api", "decode"),
        ("api", "draining"),
        ("tokenizer-0", "loading"),
        ("tokenizer-0", "idle"),
        ("tokenizer-0", "decode"),
        ("tokenizer-0", "draining"),
        ("detokenizer", "idle"),
        ("detokenizer", "decode"),
        ("grammars", "idle"),
        ("scheduler", "idle"),
    ],
)
def test_killed_child_ends_the_service(tiny_model: Path, name: str, phase: str) -> None:
    mode = "loading" if phase == "loading" else "echo"
    with run_server("--model", str(tiny_model), *DRAIN, stub=mode) as server:
        _assert_ends_when_killed(server, name, phase)


@pytest.mark.parametrize("phase", ["starting", "decode", "draining"])
def test_killed_scheduler_ends_the_service(tiny_model: Path, phase: str) -> None:
    """Here the engine is real. test_scheduler_killed_in_prefill_ends_the_service has a prefill."""
    flags = ("--model", str(tiny_model), "--num-pages", "1024", *DRAIN)
    with run_server(*flags, fresh=phase == "starting") as server:
        _assert_ends_when_killed(server, "scheduler", phase)


@pytest.mark.parametrize(
    ("phase", "stub"), [("loading", "loading"), ("decode", "echo"), ("draining", None)]
)
def test_killed_launcher_leaves_no_orphans(tiny_model: Path, phase: str, stub: str | None) -> None:
    """A signal ends the children with the launcher. A stream runs in the last two phases."""
    flags = ("--model", str(tiny_model), *DRAIN)
    with run_server(*flags, stub=stub) as server:
        stream = _bring_into(server, phase)
        launcher = psutil.Process(server.process.pid)
        pids = [process.pid for process in launcher.children(recursive=True)]
        server.process.kill()
        server.wait_exit()
        _assert_all_gone(pids)
        _assert_told(stream, lost=True)


def test_reason_of_a_crash_is_the_last_line_with_many_open_streams(tiny_model: Path) -> None:
    """Kubernetes keeps the last 2,048 bytes of the log, and each open call logs its own end."""
    with run_server("--model", str(tiny_model), stub="echo") as server:
        server.wait_ready()
        streams = [start_long_stream(server) for _ in range(20)]
        psutil.Process(server.child_pid("scheduler")).kill()
        assert server.wait_exit() == 1
        for client, _ in streams:
            client.close()
        lines = server.stderr.splitlines()
    assert sum("call ended" in line for line in lines) == 20
    assert "error: scheduler (pid" in lines[-1]


def _start_long_prefill(server: ServerProcess) -> threading.Thread:
    """Start a prompt of 3,900 tokens in chunks of 4, and wait for the first chunks."""

    def ask() -> None:
        body = {"model": "minisgl-demo", "prompt": [5, 6, 7] * 1300, "max_tokens": 4}
        with contextlib.suppress(httpx.TransportError):
            httpx.post(server.url + "/v1/completions", json=body, timeout=patience())

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: server.metrics()["batch_size_count{phase=prefill}"], "a chunk")
    return asking


def test_scheduler_killed_in_prefill_ends_the_service() -> None:
    with run_server("--max-prefill-length", "4", "--num-pages", "512") as server:
        asking = _start_long_prefill(server.wait_ready())
        assert server.metrics()["time_to_first_token_seconds_count"] == 0, (
            "the prefill ended before the kill"
        )
        pids = [server.child_pid(child) for child in CHILDREN]
        psutil.Process(server.child_pid("scheduler")).kill()
        assert server.wait_exit() == 1
        _assert_all_gone(pids)
        assert "error: scheduler (pid" in server.stderr
        asking.join()


def test_child_that_fails_to_load_is_one_line(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), stub="broken") as server:
        assert server.wait_exit() == 2
        assert "error: the model is upside down" in server.stderr
        assert "Traceback" not in server.stderr


def _complete(url: str) -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    with contextlib.suppress(httpx.TransportError):
        httpx.post(url + "/v1/completions", json=body, timeout=patience())


def test_hung_scheduler_turns_livez_503_and_ends_the_service(tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--step-timeout", "1")
    with run_server(*flags, stub="hang") as server:
        url = server.wait_ready().url
        caller = threading.Thread(target=_complete, args=(url,))
        caller.start()
        wait_for(lambda: server.status("/livez") == 503, "livez 503")
        assert server.wait_exit() == 1
        caller.join(patience())
        assert "no progress" in server.stderr


def test_stalled_scheduler_is_unready_in_seconds_and_live_until_the_timeout(
    tiny_model: Path,
) -> None:
    """Regression: a hung replica received new requests for all of the step timeout of 60 s."""
    with run_server("--model", str(tiny_model), stub="hang") as server:
        url = server.wait_ready().url
        caller = threading.Thread(target=_complete, args=(url,))
        caller.start()
        wait_for(lambda: server.status("/readyz") == 503, "readyz 503", seconds=30)
        assert server.status("/livez") == 200
        assert server.metrics()["ready"] == 0
        server.process.kill()
        caller.join(patience())


def test_idle_server_stays_live_beyond_the_step_timeout(tiny_model: Path) -> None:
    """An idle scheduler makes no steps, and does not count as hung."""
    flags = ("--model", str(tiny_model), "--step-timeout", "0.2")
    with run_server(*flags, stub="echo") as server:
        server.wait_ready()
        for _ in range(40):
            assert server.status("/livez") == 200
        assert server.client().completions.create(model="tiny", prompt="hi").choices[0].text


def test_port_taken_is_one_line_at_once(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with run_server("--model", str(tiny_model), "--host", "127.0.0.1", stub="echo") as server:
            pass
        command = [*server.process.args[:-1], str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience())
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_front_end_processes_load_no_torch(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), "--num-pages", "256", fresh=True) as server:
        pids = server.wait_ready().child_pids() | {"launcher": server.pid}
        maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    loaded = {name for name, text in maps.items() if "libtorch" in text}
    assert loaded == {"scheduler"}
    assert set(maps) == {*CHILDREN, "launcher"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading_ends_at_once(tiny_model: Path, number: signal.Signals) -> None:
    """Regression: a start that a startup probe ended was "Completed 0", without a message."""
    with run_server("--model", str(tiny_model), stub="loading") as server:
        _bring_into(server, "loading")
        wait_for(lambda: "still_loading=scheduler\n" in server.stderr, "the other processes")
        pids = list(server.child_pids().values())
        server.signal(number)
        assert server.wait_exit() == 128 + number
        _assert_all_gone(pids)
        last_line = server.stderr.splitlines()[-1]
    if number is signal.SIGTERM:
        assert "error: SIGTERM ended the start after " in last_line
        assert "while still loading: scheduler; " in last_line
        assert "startup probe" in last_line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_the_children_have_handlers(tiny_model: Path, number: signal.Signals) -> None:
    """Regression: Ctrl-C in the first half second gave a traceback from the server's imports."""
    with run_server("--model", str(tiny_model), stub="loading", fresh=True) as server:
        wait_for(lambda: "loading tiny from" in server.stderr, "the first line")
        server.signal(number)
        assert server.wait_exit() == 128 + number
        assert "Traceback" not in server.stderr


def test_two_ranks_serve_drain_and_end_together(tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--num-pages", "256", "--tp", "2", "--drain-grace", "0")
    with run_server(*flags) as server:
        server.wait_ready()
        answer = server.client().completions.create(
            model="tiny", prompt="hi", max_tokens=3, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        pids = [server.child_pid(name) for name in (*CHILDREN, "scheduler-1")]
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0, server.stderr
        _assert_all_gone(pids)


@pytest.mark.parametrize("role", ["tokenizer-0", "detokenizer", "grammars"])
def test_stopped_worker_counts_as_hung(tiny_model: Path, role: str) -> None:
    """The launcher sees a stopped process as alive. It detects the hang by missing messages."""
    flags = ("--model", str(tiny_model), "--step-timeout", "1")
    with run_server(*flags, stub="echo") as server:
        server.wait_ready()
        os.kill(server.child_pid(role), signal.SIGSTOP)
        wait_for(lambda: server.status("/livez") == 503, "livez to tell")
        assert server.wait_exit() == 1
        assert f"the {role} made no progress" in server.stderr
