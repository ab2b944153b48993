"""The event stream, and the pods that only tokenize prompts."""

import re

import pytest

from minisgl.settings.command_line import build_parser
from tests.chart.helm import Object, pick, selects
from tests.chart.test_objects import env_of
from tests.chart.test_pod import container_of

RENDER = {"enabled": True}
TAINT = {"key": "gpu", "operator": "Exists"}


def pods_of(objects: list[Object], *names: str) -> list[Object]:
    """The templates of the engine's pods and of the render pods."""
    names = names or ("minisgl", "minisgl-render")
    return [pick(objects, "Deployment", name)["spec"]["template"] for name in names]


def test_kv_events_have_ports_on_the_pods_the_headless_service_and_in_the_policy(render):
    values = {"kvEvents": {"enabled": True}, "networkPolicy": {"enabled": True}}
    objects = render(values)
    container = container_of(objects)
    assert "--kv-events-endpoint=tcp://*:5557" in container["args"]
    assert "--kv-events-replay-endpoint=tcp://*:5558" in container["args"]
    assert env_of(objects)["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["kv-events"], ports["kv-replay"]) == (5557, 5558)
    service = pick(objects, "Service", "minisgl-pods")["spec"]
    assert service["clusterIP"] == "None"
    assert {p["port"] for p in service["ports"]} == {1919, 5557, 5558}
    rule = pick(objects, "NetworkPolicy")["spec"]["ingress"][0]
    assert [port["port"] for port in rule["ports"]] == [1919, 5557, 5558]
    assert "POD_IP" not in env_of(render())


def test_no_selector_of_the_engine_matches_the_render_pods(render):
    objects = render({"render": {"enabled": True, "replicas": 3}})
    deployment = pick(objects, "Deployment", "minisgl-render")
    assert deployment["spec"]["replicas"] == 3
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    container = pod["spec"]["containers"][0]
    assert container["args"][0] == "--render-only"
    assert "nvidia.com/gpu" not in str(container["resources"])
    engine = pick(objects, "Deployment", "minisgl")["spec"]["selector"]["matchLabels"].items()
    assert not engine <= labels
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    service = pick(objects, "Service", "minisgl-render")
    assert service["spec"]["selector"].items() <= labels


def test_render_pods_have_the_keys_the_policy_and_the_drain_of_the_engine_pods(render):
    """Without a variable from extraEnvFrom, such as MINISGL_API_KEY, they would need no key."""
    sources = [{"secretRef": {"name": "keys"}}]
    peer = {"podSelector": {"matchLabels": {"a": "b"}}}
    values = {
        "render": {"enabled": True},
        "extraEnvFrom": sources,
        "drain": {"preStopSleepSeconds": 7},
        "networkPolicy": {"enabled": True, "from": [peer]},
    }
    objects = render(values)
    pods = pods_of(objects)
    for field in ("env", "envFrom", "lifecycle", "volumeMounts"):
        engine, renderer = (pod["spec"]["containers"][0][field] for pod in pods)
        assert engine == renderer, field
    selector = pick(objects, "NetworkPolicy")["spec"]["podSelector"]
    assert all(selects(selector, pod["metadata"]["labels"]) for pod in pods)
    assert not selects(selector, pick(objects, "Pod")["metadata"]["labels"])


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_a_monitor_watches_the_render_pods_too(render, kind):
    objects = render({"render": RENDER, "metrics": {kind: {"enabled": True}}})
    selector = pick(objects, kind[0].upper() + kind[1:])["spec"]["selector"]
    if kind == "podMonitor":
        watched = [pod["metadata"]["labels"] for pod in pods_of(objects)]
    else:
        services = [pick(objects, "Service", name) for name in ("minisgl", "minisgl-render")]
        watched = [service["metadata"]["labels"] for service in services]
    assert all(selects(selector, labels) for labels in watched)
    assert not selects(selector, pick(objects, "Pod")["metadata"]["labels"])


def test_an_alert_watches_the_render_pods(render):
    """The pods of both kinds match only the alerts of their kind, with a name of any length."""
    for name in ("chat", "a" * 53):
        values = {"render": RENDER, "prometheusRule": {"enabled": True}}
        objects = render(values, name=name)
        names = [o["metadata"]["name"] for o in objects if o["kind"] == "Deployment"]
        pods = {deployment: f"{deployment}-{'9' * 10}-"[:58] + "x2b4z" for deployment in names}
        rules = pick(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
        for rule in rules:
            kind = rule["alert"] == "MinisglNoReadyRenderPod"
            (pattern,) = {*re.findall(r'pod=~"([^"]*)"', rule["expr"])}
            found = [one for one, pod in pods.items() if re.fullmatch(pattern, pod)]
            assert [one.endswith("-render") for one in found] == [kind], rule["alert"]
        assert "MinisglNoReadyRenderPod" in [rule["alert"] for rule in rules]
    values["render"] = RENDER | {"replicas": 0}
    assert "MinisglNoReadyRenderPod" not in str(pick(render(values), "PrometheusRule"))


def test_render_pods_tolerate_the_taints_and_have_the_priority_of_the_release(render):
    """On a cluster whose nodes all have the taint of GPU nodes they once stayed pending."""
    shared = {"tolerations": [TAINT], "priorityClassName": "p", "schedulerName": "s"}
    engine_only = {"nodeSelector": {"gpu": "H200"}, "affinity": {"nodeAffinity": {}}}
    _, pod = pods_of(render({"render": RENDER, **shared, **engine_only}))
    assert {name: pod["spec"][name] for name in shared} == shared
    assert not engine_only.keys() & pod["spec"].keys(), "they need no GPU"
    _, pod = pods_of(render({"render": RENDER}))
    assert pod["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_render_pods_have_scheduling_fields_of_their_own(render):
    bare = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {
        "tolerations": [],
        "nodeSelector": {"pool": "cpu"},
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "low",
        "schedulerName": "own",
        "topologySpreadConstraints": [bare],
    }
    objects = render({"render": RENDER | {"scheduling": own}, "priorityClassName": "high"})
    engine, pod = pods_of(objects)
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert selects(spread.pop("labelSelector"), pod["metadata"]["labels"])
    assert pod["spec"].items() >= {k: v for k, v in own.items() if k != "tolerations"}.items()
    assert "tolerations" not in pod["spec"]
    assert engine["spec"]["priorityClassName"] == "high"
    assert "nodeSelector" not in engine["spec"]


def test_several_render_pods_have_a_disruption_budget(render):
    """A drain of their node once evicted all of them at the same time."""
    objects = render({"render": RENDER | {"replicas": 2}, "replicas": 2})
    _, pod = pods_of(objects)
    budgets = {o["metadata"]["name"]: o["spec"] for o in objects if "Budget" in o["kind"]}
    assert selects(budgets["minisgl-render"]["selector"], pod["metadata"]["labels"])
    assert not selects(budgets["minisgl"]["selector"], pod["metadata"]["labels"])
    assert budgets["minisgl-render"]["maxUnavailable"] == 1
    for values in ({"render": RENDER}, {"podDisruptionBudget": {"enabled": False}}):
        values = {"render": RENDER | {"replicas": 2}} | values
        assert not [o for o in render(values) if "Budget" in o["kind"]]


def test_notes_name_the_service_of_the_render_pods(notes):
    assert "http://minisgl-render.llm.svc:1919" in notes({"render": RENDER})
    assert "-render" not in notes({})


def test_the_flags_of_the_render_pods_are_known_to_the_server(render):
    values = {"render": RENDER, "kvEvents": {"enabled": True}}
    _, pod = pods_of(render(values))
    options = build_parser().parse_strictly(pod["spec"]["containers"][0]["args"])
    assert getattr(options, "server.render_only") is True
