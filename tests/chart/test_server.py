"""The real server runs with the rendered flags, environment, probes and drain."""

import os
import re
import signal
import socket

import httpx
import pytest
from k8s_harness.values import held

from tests.chart.helm import CHART, Object
from tests.chart.test_pod import container_of, pod_of
from tests.patience import patience
from tests.process.harness import run_server, wait_for

pytestmark = pytest.mark.process
VALUES = {
    "gpu": {"enabled": False},
    "server": {"maxRunningRequests": 8},
    "drain": {"graceSeconds": 0, "timeoutSeconds": 5},
}


@pytest.fixture
def pod(render, monkeypatch, tmp_path) -> Object:
    """The CPU pod. The test sets its environment, with /cache in a temporary folder."""
    pod = pod_of(render(VALUES))
    for entry in container_of(render(VALUES))["env"]:
        monkeypatch.setenv(entry["name"], entry["value"].replace("/cache", str(tmp_path), 1))
    assert os.environ["HOME"] == str(tmp_path)
    return pod


def test_rendered_container_serves_and_ends_within_its_grace_period(pod):
    container = pod["containers"][0]
    with run_server(*container["args"], "--probe-port", "0") as server:
        server.wait_ready()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            url = server.probe_url + container[probe]["httpGet"]["path"]
            assert httpx.get(url, timeout=patience()).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.process.wait(timeout=pod["terminationGracePeriodSeconds"]) == 0
        assert "unknown environment variable" not in server.stderr


def test_a_held_server_is_live_and_not_ready_until_the_file_exists(render, monkeypatch, tmp_path):
    """With these values k8s-tests/test_start.py compares a pod that loads with its probes."""
    values = held()
    (code,) = (o for o in render(values) if o["metadata"]["name"] == "held")
    container = container_of(render(values))
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["PYTHONPATH"] == mounted["held"]
    (tmp_path / "sitecustomize.py").write_text(code["data"]["sitecustomize.py"])
    ours = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", ours)
    monkeypatch.setenv("HELD_UNTIL", str(tmp_path / "go"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def probe(path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=patience()).status_code
        except httpx.TransportError:
            return 0  # the server does not listen yet

    with run_server("--device", "cpu", "--probe-port", str(port)) as server:
        wait_for(lambda: probe("/livez") == 200, "a live server")
        assert probe("/readyz") == 503
        assert "listening" not in server.stderr, "the scheduler has checked its configuration"
        (tmp_path / "go").touch()
        server.wait_ready()
        assert probe("/readyz") == 200


def test_environment_of_the_chart_is_known_to_the_server():
    """The server only logs a warning for a misspelt MINISGL_ variable."""
    from minisgl.settings.places import flag_variables
    from minisgl.settings.resolve import VARIABLES_WITHOUT_FLAG

    known = {*VARIABLES_WITHOUT_FLAG, *flag_variables()}
    text = (CHART / "templates" / "_env.tpl").read_text()
    used = set(re.findall(r"\bMINISGL_\w+", text))
    assert len(used) == 2
    assert used <= known
