"""The probe port answers from a thread of its own, while no other event loop runs."""

import socket

import httpx
import pytest

from minisgl.message.messages import Ready
from minisgl.server.edge.probes import serve_probes
from minisgl.server.observe.lifecycle import Lifecycle, Phase
from tests.patience import patience
from tests.unit.server.fakes import FACTS


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle(frozenset({"scheduler"}))


def asked(lifecycle: Lifecycle, *paths: str) -> list[int]:
    """The statuses of requests to a served port. This thread blocks in each request."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, number = listener.getsockname()
    serve_probes(lifecycle, listener)
    return [
        httpx.get(f"http://{host}:{number}{path}", timeout=patience()).status_code for path in paths
    ]


def test_probes_follow_the_phase(lifecycle: Lifecycle) -> None:
    assert asked(lifecycle, "/livez", "/readyz", "/health") == [200, 503, 503]
    lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    assert asked(lifecycle, "/livez", "/readyz", "/health") == [200, 200, 200]
    lifecycle.phase = Phase.GRACE
    assert asked(lifecycle, "/livez", "/readyz") == [200, 503]
    lifecycle.phase = Phase.FAILED
    assert asked(lifecycle, "/livez", "/readyz") == [503, 503]


def test_probes_fail_while_a_worker_makes_no_progress(lifecycle: Lifecycle) -> None:
    lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    lifecycle.stalled = "scheduler"
    assert asked(lifecycle, "/livez", "/readyz") == [200, 503]
    lifecycle.hung = "scheduler"
    assert asked(lifecycle, "/livez", "/readyz") == [503, 503]


def test_probes_fail_while_the_event_loop_of_the_service_stands_still(
    lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port has a loop of its own, so that its answer alone says nothing about the service."""
    lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    monkeypatch.setattr("minisgl.server.edge.probes._MAX_SILENCE_S", -1.0)
    assert asked(lifecycle, "/livez", "/readyz") == [503, 503]
    monkeypatch.undo()
    assert asked(lifecycle, "/livez", "/readyz") == [200, 200]


def test_other_paths_are_not_served(lifecycle: Lifecycle) -> None:
    assert asked(lifecycle, "/metrics", "/v1/models", "/docs") == [404] * 3
