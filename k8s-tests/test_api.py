"""A release with an API key: clients, metrics, dashboards, and the limits of the container."""

import json
import re
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from k8s_harness.kube import Kube
from k8s_harness.objects import Object
from k8s_harness.reach import reached
from k8s_harness.release import NAME, Release
from k8s_harness.settings import Settings
from k8s_harness.values import cpu
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.chart.table import metrics, names_in

KEY = "a-key-for-this-test"
MODEL = "minisgl-demo"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def release(install, image, namespace: Kube) -> Release:
    meta = {"name": "clients"}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"api-key": KEY}}
    namespace.create(body)
    return install(cpu(image, auth={"existingSecret": "clients"})).wait_ready()


@pytest.fixture
def ai(release: Release, settings: Settings) -> Iterator[openai.OpenAI]:
    with (
        reached(release, settings.reach) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client,
    ):
        yield client


def scraped(release: Release) -> dict[str, Metric]:
    """The metric families of the pod's /metrics, by their documented names."""
    time.sleep(0.1)  # a scrape may be this old
    status, text = release.kube.probe(release.the_pod(), "/metrics")
    assert status == 200
    families = text_string_to_metric_families(text)
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in families}


def test_openai_client(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    answer = ai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    text = ai.completions.create(model=MODEL, prompt="Hello", max_tokens=5)
    assert text.usage is not None
    assert text.usage.completion_tokens <= 5


def test_openai_client_streams(ai: openai.OpenAI) -> None:
    chunks = list(
        ai.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "42"
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 1


def test_key_from_the_secret_is_enforced(web: httpx.Client, ai: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
        answer = web.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in answer.text
    assert web.get("/v1/models").status_code == 401
    assert {web.get(path).status_code for path in ("/livez", "/readyz", "/metrics")} == {200}
    with pytest.raises(openai.AuthenticationError):
        ai.with_options(api_key="wrong").models.list()


def test_a_client_key_opens_no_admin_route(web: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert web.get("/server_info", headers=headers).status_code == 403


def test_helm_test_sends_the_key(release: Release) -> None:
    release.helm.test(NAME)


def test_metrics_have_their_types_and_labels(release: Release, ai: openai.OpenAI) -> None:
    """Types and labels after traffic equal the table of docs/operations.md."""
    ai.chat.completions.create(model=MODEL, messages=QUESTION)
    found = scraped(release)
    table = metrics()
    assert {name: m.type for name, m in table.items() if name not in found} == {}
    wrong = {name for name in table if found[name].type != table[name].type}
    assert wrong == set()
    for name, metric in table.items():
        labels = {frozenset(s.labels) - {"le"} for s in found[name].samples}
        assert labels == {metric.labels}, name


def test_each_pod_has_one_series(release: Release) -> None:
    """Each metric that an autoscaler sums has one series, and no set of labels occurs twice."""
    found = scraped(release)
    for name in ("minisgl_requests_running", "minisgl_requests_waiting", "minisgl_ready"):
        assert len(found[name].samples) == 1, name
    series = [(s.name, *sorted(s.labels.items())) for f in found.values() for s in f.samples]
    assert len(series) == len(set(series))


def test_dashboards_use_only_exported_metrics(release: Release, namespace: Kube) -> None:
    """Compares the ConfigMap in the cluster with the metrics of the pod."""
    series = {s.name for family in scraped(release).values() for s in family.samples}
    boards: Object = {}
    for one in namespace.all("ConfigMap", "grafana_dashboard=1"):
        boards |= one["data"]
    assert len(boards) == 2
    for name, text in boards.items():
        board = json.loads(text)
        targets = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
        variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
        assert targets
        for expression in [*targets, *variables]:
            assert names_in(expression), f"{name}: {expression}"
            assert names_in(expression) <= series, f"{name}: {expression}"


def test_no_secret_is_in_objects_or_logs(release: Release, namespace: Kube) -> None:
    pod = namespace.need("Pod", release.the_pod())
    assert KEY not in json.dumps([pod, release.deployment])
    assert KEY not in (namespace.logs(pod["metadata"]["name"], NAME) or "")


def execute(release: Release, code: str) -> str:
    status, output = release.kube.execute(release.the_pod(), "python3", "-c", code)
    assert status == 0, output
    return output.strip()


def test_no_root_and_no_capability(release: Release) -> None:
    assert execute(release, "import os; print(os.getuid(), os.getgid())") == "10001 10001"
    text = execute(release, "print(open('/proc/1/status').read())")
    fields = dict(re.findall(r"^(\w+):\t(.*)$", text, re.M))
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_root_is_read_only(release: Release) -> None:
    """Tries to create a file in every folder: only the two volumes allow it."""
    code = (
        "import errno, os\n"
        "fine = errno.EROFS, errno.EACCES, errno.EPERM\n"
        "for folder, folders, _ in os.walk('/'):\n"
        "    if folder in ('/proc', '/sys', '/dev'): folders.clear(); continue\n"
        "    try: os.close(os.open(folder + '/probe', os.O_CREAT | os.O_WRONLY))\n"
        "    except OSError as e:\n"
        "        if e.errno not in fine: print('?', folder, e)\n"
        "    else: os.unlink(folder + '/probe'); print(folder); folders.clear()\n"
    )
    assert set(execute(release, code).split("\n")) <= {"/tmp", "/cache"}
    code = "import os; os.mkdir('/opt/minisgl/probe')"
    status, output = release.kube.execute(release.the_pod(), "python3", "-c", code)
    assert status != 0
    assert "Read-only file system" in output


def test_no_kubernetes_credentials(release: Release) -> None:
    code = (
        "import os\n"
        "print(os.path.exists('/var/run/secrets/kubernetes.io'))\n"
        "print([k for k in os.environ if k.endswith('_SERVICE_HOST')])"
    )
    assert execute(release, code) == "False\n['KUBERNETES_SERVICE_HOST']"
