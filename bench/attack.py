"""Does a client slow the server or other clients down, or fill its memory?

Each attack gets a server with the demo model and a process that runs the attack. Most attackers
have no key. Two other processes then ask /livez every 20 ms on the main port and on the probe port,
and this process reads the memory of the server's processes. The attackers of attack_keys.py have a
key, and this process measures the requests of another key.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import re
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from bench.attack_keys import KEY_ATTACKS, key_flags, measure_keys
from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.server_process import start_server
from minisgl.demo import model_path
from minisgl.settings.config import DEMO_NAME

_PAUSE_S = 0.02
_GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


class Attack(NamedTuple):
    """Connections that send `head` once and then `more` again and again.

    more: None sends nothing further. part_bytes: bytes of one send call. reads: the clients read
    the answers. tls: the server speaks TLS; "begin" sends `head` as the start of a handshake,
    "end" completes it. A connection that the server closes is opened again. files: hard limit of
    the open files of each process of the server; None: that of this process.
    """

    connections: int
    head: bytes = b""
    more: bytes | None = None
    part_bytes: int = 2**16
    reads: bool = False
    tls: Literal["", "begin", "end"] = ""
    files: int | None = None


class _Found(NamedTuple):
    """Median and largest time of /livez on each port, and peak memory of each process.

    The time of a probe without an answer is inf.
    """

    probe_port_ms: tuple[float, float]
    main_port_ms: tuple[float, float]
    peak_mib: dict[str, int]


ATTACKS = {
    "nothing": Attack(0),
    "pipelined GET /": Attack(30, more=_GET % b"/" * 2000),
    "pipelined GET /metrics, unread": Attack(200, more=_GET % b"/metrics" * 10_000),
    "a new request after each answer": Attack(200, more=_GET % b"/nowhere", reads=True),
    "12,500 tiny headers, unfinished": Attack(1000, b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 12_500),
    "upgrade header byte by byte": Attack(300, b"GET / HTTP/1.1\r\nupgrade: ", b"y", 1),
    "malformed requests": Attack(35, more=b"\x16\x03\x01" * 100),
    "chunks of one byte": Attack(50, _CHUNKED, b"1\r\nx\r\n" * 10_000),
    "chunk extensions": Attack(50, _CHUNKED + b"1;", b"e" * 2**16),
    "trailers": Attack(50, _CHUNKED + b"0\r\n", b"t: u\r\n" * 10_000),
    "empty lines": Attack(50, more=b"\r\n" * 30_000),
    "idle connections": Attack(6000),
    "1,024 idle connections, 1,024 files": Attack(1024, files=1024),
    "900 TLS handshakes": Attack(900, tls="end"),
    "3,000 unfinished TLS handshakes": Attack(3000, b"\x16\x03\x01\x00\x40\x01", tls="begin"),
}


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _client(host: str, port: int, attack: Attack) -> None:
    """One connection of the attack. A new one follows when the server closes it."""
    tls = _unverified() if attack.tls == "end" else None
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                writer.write(attack.head)
                await writer.drain()
                while attack.more is not None:
                    for start in range(0, len(attack.more), attack.part_bytes):
                        writer.write(attack.more[start : start + attack.part_bytes])
                        await writer.drain()
                    if attack.reads and not await reader.read(2**16):
                        break
                    await asyncio.sleep(0)
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def _run_clients(url: str, attack: Attack, seconds: float) -> None:
    parts = urlsplit(url)
    clients = (
        _client(str(parts.hostname), int(parts.port or 80), attack)
        for _ in range(attack.connections)
    )
    tasks = [asyncio.create_task(client) for client in clients]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()


def _attack(url: str, attack: Attack, seconds: float) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_run_clients(url, attack, seconds))


def _probe(url: str, seconds: float, pipe: Connection) -> None:
    """Ask /livez on a new connection each time. Send the times in ms to `pipe`; inf: no answer."""
    parts = urlsplit(url)
    times_ms: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        address = str(parts.hostname), parts.port
        connection = (
            http.client.HTTPSConnection(*address, timeout=10, context=_unverified())
            if parts.scheme == "https"
            else http.client.HTTPConnection(*address, timeout=10)
        )
        try:
            connection.request("GET", "/livez")
            ok = connection.getresponse().status == 200
        except OSError:
            ok = False
        connection.close()
        times_ms.append((time.monotonic() - started_s) * 1e3 if ok else math.inf)
        time.sleep(_PAUSE_S)
    pipe.send(times_ms)


def _measure(url: str, probe_url: str, attack: Attack, seconds: float) -> _Found:
    server = _server_processes()
    spawn = multiprocessing.get_context("spawn")
    attacker = spawn.Process(target=_attack, args=(url, attack, seconds + 3), daemon=True)
    attacker.start()
    time.sleep(1.5)  # for the start of the attack
    receivers = []
    for target in (probe_url, url):
        receiver, sender = spawn.Pipe(duplex=False)
        spawn.Process(target=_probe, args=(target, seconds, sender), daemon=True).start()
        receivers.append(receiver)
    peak_mib: dict[str, int] = {}
    while not all(receiver.poll(0.05) for receiver in receivers):
        for name, status in server.items():
            rss = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            peak_mib[name] = int(rss[1]) // 1024 if rss else 0
    times_ms = [sorted(receiver.recv()) for receiver in receivers]
    attacker.kill()
    attacker.join()
    probe_ms, main_ms = ((times[len(times) // 2], times[-1]) for times in times_ms)
    return _Found(probe_ms, main_ms, peak_mib)


def _server_processes() -> dict[str, Path]:
    """The name of each process of the server, and the file with its memory."""
    found = {}
    for launcher in _children(os.getpid()):
        for pid in _children(launcher):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "minisgl.launch.worker_main" in words:
                found[words[-3]] = Path(f"/proc/{pid}/status")
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main(argv: Sequence[str]) -> int:
    """Print a line for each attack, and one line of JSON."""
    names = [*ATTACKS, *KEY_ATTACKS]
    parser = argparse.ArgumentParser(prog="python -m bench attack", description=__doc__)
    parser.add_argument(
        "--seconds", type=positive_int, default=5, help="time of each attack without a key"
    )
    parser.add_argument(
        "--requests",
        type=positive_int,
        default=50,
        help="requests of the other key, alone and beside each attack with a key",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="ATTACK",
        help="run these attacks alone: " + "; ".join(map(repr, names)),
    )
    options, flags = parser.parse_known_args(argv)
    results: dict[str, dict[str, object]] = {}
    flags += ["--probe-port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        tls_flags, keys = _certificate(Path(folder)), key_flags(Path(folder))
        for name in options.only or names:
            if name in KEY_ATTACKS:
                line, results[name] = _run_keys(name, [*flags, *keys], options.requests)
            else:
                all_flags = [*flags, *(tls_flags if ATTACKS[name].tls else ())]
                line, results[name] = _run(name, all_flags, options.seconds)
            print(f"{name:<36} {line}", flush=True)
    print(json.dumps(results))
    return 0


def _run(name: str, flags: Sequence[str], seconds: float) -> tuple[str, dict[str, object]]:
    """Run an attack without a key. Returns the line and the values of its result."""
    files = ATTACKS[name].files
    limit = None if files is None else partial(setrlimit, RLIMIT_NOFILE, (files, files))
    with start_server(str(model_path()), flags, before=limit) as server:
        found = _measure(server.url, server.probe_url, ATTACKS[name], seconds)
    ports = (("probe port", found.probe_port_ms), ("main port", found.main_port_ms))
    shown = (f"{port} p50 {p50:6.1f} max {most:8.1f} ms" for port, (p50, most) in ports)
    return f"{', '.join(shown)}, API {found.peak_mib['api']} MiB", found._asdict()


def _run_keys(name: str, flags: Sequence[str], requests: int) -> tuple[str, dict[str, object]]:
    """Run an attack with a key. Returns the line and the values of its result."""
    all_flags = ["--served-model-name", DEMO_NAME, *flags, *KEY_ATTACKS[name].flags]
    with start_server(str(model_path()), all_flags) as server:
        before = _server_processes()
        found = measure_keys(server.url, DEMO_NAME, name, requests)
        after = _server_processes()
    ended = [role for role, status in before.items() if after.get(role) != status]
    verdict = "within" if found.beside_p95_ms <= found.bar_ms and not ended else "MISSES"
    line = (
        f"first token p95 alone {found.alone_p95_ms:6.1f} ms, beside {found.beside_p95_ms:8.1f} ms,"
        f" step {found.step_ms:6.1f} ms: {verdict} the bar of {found.bar_ms:.1f} ms;"
        f" ended processes: {', '.join(ended) or 'none'}"
    )
    return line, {**found._asdict(), "bar_ms": found.bar_ms, "ended": ended}


def _certificate(folder: Path) -> list[str]:
    """Make a self-signed certificate, and return the flags of a server that uses it."""
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return ["--ssl-keyfile", key, "--ssl-certfile", certificate]
