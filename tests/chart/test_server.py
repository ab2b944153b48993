"""The real server runs with the rendered flags, environment, probes and drain."""

import os
import re
import signal

import httpx
import pytest

from tests.chart.helm import CHART, Object
from tests.chart.test_pod import container_of, pod_of
from tests.patience import patience
from tests.process.harness import run_server

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


def test_environment_of_the_chart_is_known_to_the_server():
    """The server only logs a warning for a misspelt MINISGL_ variable."""
    from minisgl.settings.places import flag_variables
    from minisgl.settings.resolve import VARIABLES_WITHOUT_FLAG

    known = {*VARIABLES_WITHOUT_FLAG, *flag_variables()}
    text = (CHART / "templates" / "_env.tpl").read_text()
    used = set(re.findall(r"\bMINISGL_\w+", text))
    assert len(used) == 2
    assert used <= known
