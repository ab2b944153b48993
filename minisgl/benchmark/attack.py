"""`minisgl bench attack`: does a client without a key slow the server down or fill its memory?

It starts a server with the demo model. One process runs an attack, two others ask /livez every
20 ms on the main port and on the probe port, and this process reads the memory of the server's
processes. ATTACKS lists the attacks as data.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.server_process import start_server
from minisgl.demo import model_path

_PAUSE_S = 0.02
_GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


class Attack(NamedTuple):
    """Connections that send `head` once and then `more` again and again.

    more: None sends nothing further. part_bytes: bytes of one send call. reads: the clients read
    the answers. tls: the server speaks TLS; "begin" sends `head` as the start of a handshake,
    "end" completes it. A connection that the server closes is opened again.
    """

    connections: int
    head: bytes = b""
    more: bytes | None = None
    part_bytes: int = 2**16
    reads: bool = False
    tls: Literal["", "begin", "end"] = ""


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
    "10,800 tiny headers, unfinished": Attack(1000, b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 12_500),
    "upgrade header byte by byte": Attack(300, b"GET / HTTP/1.1\r\nupgrade: ", b"y", 1),
    "malformed requests": Attack(35, more=b"\x16\x03\x01" * 100),
    "chunks of one byte": Attack(50, _CHUNKED, b"1\r\nx\r\n" * 10_000),
    "chunk extensions": Attack(50, _CHUNKED + b"1;", b"e" * 2**16),
    "trailers": Attack(50, _CHUNKED + b"0\r\n", b"t: u\r\n" * 10_000),
    "empty lines": Attack(50, more=b"\r\n" * 30_000),
    "idle connections": Attack(6000),
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
            if "minisgl.server.worker_main" in words:
                found[words[-3]] = Path(f"/proc/{pid}/status")
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main(argv: Sequence[str]) -> int:
    """Print a line for each attack, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench attack", description=__doc__)
    parser.add_argument("--seconds", type=positive_int, default=5, help="time of each attack")
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), help="names of attacks")
    options, flags = parser.parse_known_args(argv)
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tls_flags = _certificate(Path(folder))
        for name in options.only or ATTACKS:
            attack = ATTACKS[name]
            all_flags = [*flags, "--probe-port", "0", *(tls_flags if attack.tls else ())]
            with start_server(str(model_path()), all_flags) as server:
                found = _measure(server.url, server.probe_url, attack, options.seconds)
            results[name] = found._asdict()
            ports = (("probe port", found.probe_port_ms), ("main port", found.main_port_ms))
            shown = (f"{port} p50 {p50:6.1f} max {most:8.1f} ms" for port, (p50, most) in ports)
            print(f"{name:<34} {', '.join(shown)}, API {found.peak_mib['api']} MiB", flush=True)
    print(json.dumps(results))
    return 0


def _certificate(folder: Path) -> list[str]:
    """Make a self-signed certificate, and return the flags of a server that uses it."""
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return ["--ssl-keyfile", key, "--ssl-certfile", certificate]
