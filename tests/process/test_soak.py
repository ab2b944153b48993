"""A mixed load of three keys with disconnects and aborts at random times; one key is hostile.

No request is lost or stuck, every page is returned, and no process grows. The hostile key floods
its queue; requests of the two other keys are neither refused nor starved.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

CLIENTS = 6
KEYS = ("one", "two")
HOSTILE = "three"
FLOOD = {
    "model": "minisgl-demo",
    "prompt": "Count",
    "n": 64,
    "max_tokens": 1000,
    "ignore_eos": True,
}
STUCK_S = 300.0  # far longer than any response takes, even on a busy machine
TOTAL_PAGES = 512  # small enough for evictions and preemptions
ADMIN = {"authorization": "Bearer root"}


def request_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a random valid request."""
    words = " ".join(draw.choice(["one", "two", "é€", "2 plus 2", "spell"]) for _ in range(60))
    body: dict[str, Any] = {
        "model": "minisgl-demo",
        "max_tokens": draw.choice([1, 4, 30, 200]),
        "ignore_eos": draw.random() < 0.3,
        "n": draw.choice([1, 1, 3]),
        "stream": draw.random() < 0.6,
        "temperature": draw.choice([0, 1]),
        "seed": draw.randrange(2**40),
        "cache_salt": draw.choice(["", "", "other"]),
        "frequency_penalty": draw.choice([0, 0, 1]),
        "stop": draw.choice([[], ["e"]]),
    }
    if draw.random() < 0.5:
        text = words[: draw.randrange(1, 300)]
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    more = {"prompt": [words, words[:40]], "echo": draw.random() < 0.3}
    return "/v1/completions", {**body, **more, "logprobs": draw.choice([None, 2])}


class Load:
    """Client threads that send requests until the end of the `with` block.

    done: number of complete responses. bad: descriptions of wrong responses.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._stop = threading.Event()
        self.done = 0
        self.bad: list[str] = []
        self.floods = 0
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]
        self._threads += [threading.Thread(target=self._flood, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(patience(STUCK_S))
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        headers = {"authorization": f"Bearer {KEYS[seed % len(KEYS)]}"}
        with httpx.Client(base_url=self._url, timeout=patience(STUCK_S), headers=headers) as client:
            while not self._stop.is_set():
                path, body = request_of(draw)
                started_s = time.monotonic()
                try:
                    self._one(client, draw, path, body)
                except httpx.HTTPError as error:
                    self.bad.append(f"{error!r} {time.monotonic() - started_s:.0f} s {path} {body}")

    def _flood(self, seed: int) -> None:
        """Keep 64 long answers open, and leave each call after some events."""
        draw = random.Random(seed)
        headers = {"authorization": f"Bearer {HOSTILE}"}
        with httpx.Client(base_url=self._url, timeout=patience(STUCK_S), headers=headers) as client:
            while not self._stop.is_set():
                body = {**FLOOD, "stream": True, "cache_salt": str(draw.randrange(9))}
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in zip(answer.iter_bytes(), range(draw.randrange(2000)), strict=False):
                        if self._stop.is_set():
                            break
                self.floods += answer.status_code == 200

    def _one(
        self, client: httpx.Client, draw: random.Random, path: str, body: dict[str, Any]
    ) -> None:
        name = f"soak-{draw.randrange(2**60)}"
        action = draw.random()
        with client.stream("POST", path, json=body, headers={"x-request-id": name}) as answer:
            if action < 0.2:
                return  # disconnect before reading
            pieces = []
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if action < 0.35:
                    return
                if action < 0.45:
                    client.post("/abort", json={"request_id": name}, headers=ADMIN)
        if action < 0.45:
            return
        text = b"".join(pieces).decode()
        if answer.status_code != 200 or ("stream" in body and '"error"' in text):
            self.bad.append(f"{answer.status_code} {text[-300:]}")
        self.done += 1


def memory_bytes(server: ServerProcess) -> dict[str, int]:
    return {n: psutil.Process(pid).memory_info().rss for n, pid in server.child_pids().items()}


def all_pages_returned(server: ServerProcess) -> bool:
    info = httpx.get(server.url + "/server_info", headers=ADMIN, timeout=patience(STUCK_S)).json()
    stats = info["stats"]
    if info["open_requests"] or stats["busy"]:
        return False
    assert stats["locked_pages"] == 0
    return stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"] == TOTAL_PAGES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duration_s", "early_share", "growth"),
    [
        (5, 2 / 3, 1.1),  # in its first seconds a process fills its caches
        pytest.param(1800, 1 / 5, 1.05, marks=pytest.mark.proof),
    ],
)
def test_soak(duration_s: int, early_share: float, growth: float, tmp_path: Path) -> None:
    """The memory of each process at the end is at most `growth` times its early memory.

    early_share: the early memory is the most in this part of the time.
    """
    keys = tmp_path / "keys"
    keys.write_text("a: one\nb: two\nhostile: three\n")
    flags = ("--num-pages", str(TOTAL_PAGES), "--max-running-requests", "8")
    flags += ("--api-key-file", str(keys), "--key-metrics")
    with run_server(*flags, "--admin-api-key", "root", fresh=True) as server:
        server.wait_ready()
        end_s = time.monotonic() + duration_s
        with Load(server) as load:
            early: dict[str, int] = {}
            while time.monotonic() < end_s:
                time.sleep(1)
                if not early or end_s - time.monotonic() > (1 - early_share) * duration_s:
                    for name, rss in memory_bytes(server).items():
                        early[name] = max(early.get(name, 0), rss)
                assert server.status("/livez") == 200
        assert not load.bad, load.bad[:3]
        assert load.done >= CLIENTS
        assert load.floods > 0
        counted = server.metrics()
        assert counted["key_rejected_total{key=a}"] == counted["key_rejected_total{key=b}"] == 0
        assert counted["key_requests_total{key=a}"] > 0
        assert counted["key_requests_total{key=b}"] > 0
        wait_for(lambda: all_pages_returned(server), "all pages to be returned")
        late = memory_bytes(server)
        for name in early:  # shown by pytest -rP
            print(f"{name}: {early[name] / 2**20:.1f} MiB, then {late[name] / 2**20:.1f} MiB")
        ended = {k: v for k, v in server.metrics().items() if k.startswith("requests_total")}
        print(f"{duration_s} s, {load.done} complete responses to {CLIENTS} clients; {ended}")
        grown = {n: (early[n], late[n]) for n in early if late[n] > growth * early[n]}
        assert not grown, "bytes early, and at the end"
