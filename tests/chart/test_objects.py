"""The objects around the Deployment: secrets, claims, scaling, routing, monitors."""

import re

import pytest
import yaml

from tests.chart.helm import CHART, Object, pick, selects
from tests.chart.test_pod import container_of, pod_of

TOKEN, KEY = "hf_canary-token", "canary-key"


def kinds(objects: list[Object]) -> list[str]:
    return [one["kind"] for one in objects]


def env_of(objects: list[Object]) -> dict[str, Object]:
    entries = container_of(objects)["env"]
    return {e["name"]: {k: v for k, v in e.items() if k != "name"} for e in entries}


def test_secret_values_are_in_secrets_only(helm):
    values = {"huggingface": {"token": TOKEN}, "auth": {"apiKey": KEY}, "replicas": 2}
    texts = helm.template(values, name="minisgl", namespace="llm", chart=CHART)
    leaks = [p for p, text in texts.items() if (TOKEN in text or KEY in text)]
    assert sorted(p.rsplit("/", 1)[1] for p in leaks) == [
        "secret-api-key.yaml",
        "secret-huggingface.yaml",
    ]


def test_pods_refer_to_the_made_secrets_by_name_and_key(render):
    objects = render({"huggingface": {"token": TOKEN}, "auth": {"apiKey": KEY}})
    environment = env_of(objects)
    for variable, value in (("HF_TOKEN", TOKEN), ("MINISGL_API_KEY", KEY)):
        reference = environment[variable]["valueFrom"]["secretKeyRef"]
        secret = pick(objects, "Secret", reference["name"])
        assert secret["stringData"] == {reference["key"]: value}
        assert "optional" not in reference
    test = pick(objects, "Pod")["spec"]["containers"][0]["env"][0]
    assert test["valueFrom"] == environment["MINISGL_API_KEY"]["valueFrom"]


def test_existing_secrets_are_used_and_none_is_made(render):
    values = {
        "huggingface": {"existingSecret": "hub", "key": "t"},
        "auth": {"existingSecret": "clients", "key": "k", "adminSecret": "admins"},
    }
    objects = render(values)
    assert "Secret" not in kinds(objects)
    variables = ("HF_TOKEN", "MINISGL_API_KEY", "MINISGL_ADMIN_API_KEY")
    references = [env_of(objects)[n]["valueFrom"]["secretKeyRef"] for n in variables]
    assert references == [
        {"name": "hub", "key": "t"},
        {"name": "clients", "key": "k"},
        {"name": "admins", "key": "admin-api-key"},
    ]


def test_pods_restart_when_a_made_secret_changes(render):
    def annotations(key: str) -> Object:
        template = pick(render({"auth": {"apiKey": key}}), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]

    assert annotations("a") == annotations("a")
    assert annotations("a")["checksum/api-key"] != annotations("b")["checksum/api-key"]


def test_cache_claim_outlives_the_release_and_is_mounted(render):
    objects = render({"cache": {"enabled": True, "size": "7Gi", "storageClass": "fast"}})
    claim = pick(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    volumes = {v["name"]: v for v in pod_of(objects)["volumes"]}
    claim_name = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim_name == claim["metadata"]["name"]
    existing = render({"cache": {"enabled": True, "existingClaim": "mine"}})
    assert "PersistentVolumeClaim" not in kinds(existing)


def test_offline_sets_the_variable_of_the_hub_library(render):
    assert env_of(render())["HF_HUB_OFFLINE"] == {"value": "1"}
    model = {"model": {"id": "Qwen/Qwen3-8B"}}
    assert "HF_HUB_OFFLINE" not in env_of(render(model))
    offline = {**model, "huggingface": {"offline": True}, "cache": {"enabled": True}}
    assert "HF_HUB_OFFLINE" in env_of(render(offline))


def test_a_variable_in_extra_env_replaces_the_chart_s_variable(render):
    """If a name occurred twice, an upgrade that removes one entry would be merged wrongly."""
    given = [{"name": "HF_HOME", "value": "/models"}, {"name": "A", "value": "b"}]
    environment = container_of(render({"extraEnv": given}))["env"]
    assert [e for e in environment if e["name"] in ("HF_HOME", "A")] == given
    assert {e["name"] for e in environment} == {*env_of(render()), "A"}


def test_one_pod_has_no_disruption_budget(render):
    assert "PodDisruptionBudget" not in kinds(render())
    assert pick(render({"replicas": 2}), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    scaled = {"autoscaling": {"hpa": {"enabled": True}}}
    assert "PodDisruptionBudget" in kinds(render(scaled))


@pytest.mark.parametrize(
    ("which", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")]
)
def test_an_autoscaler_owns_the_replicas(render, which, kind):
    values = {"autoscaling": {which: {"enabled": True}}}
    if which == "keda":
        values["autoscaling"]["keda"]["prometheusAddress"] = "http://prometheus:9090"
    objects = render(values)
    assert "replicas" not in pick(objects, "Deployment")["spec"]
    assert pick(objects, kind)["spec"]["scaleTargetRef"]["name"] == "minisgl"
    assert pick(render(), "Deployment")["spec"]["replicas"] == 1


def test_keda_queries_only_this_release(render):
    keda = {"enabled": True, "prometheusAddress": "http://p:9090", "authentication": "auth"}
    spec = pick(render({"autoscaling": {"keda": keda}}, name="chat"), "ScaledObject")["spec"]
    queries = [t["metadata"]["query"] for t in spec["triggers"]]
    selector = '{namespace="llm",pod=~"chat-minisgl-[a-z0-9]+-[a-z0-9]+"}'
    assert queries == [
        f"sum(minisgl_requests_running{selector})",
        f"sum(minisgl_requests_waiting{selector})",
    ]
    assert {t["metadata"]["ignoreNullValues"] for t in spec["triggers"]} == {"false"}
    assert all(t["authenticationRef"] == {"name": "auth"} for t in spec["triggers"])


@pytest.mark.parametrize("name", ["chat", "a" * 53])
def test_queries_find_pods_of_any_release_name(render, name):
    """Kubernetes cuts the part of a pod's name before its five random letters to 58 characters."""
    keda = {"enabled": True, "prometheusAddress": "http://p:9090"}
    objects = render({"autoscaling": {"keda": keda}}, name=name)
    deployment = pick(objects, "Deployment")["metadata"]["name"]
    pod = f"{deployment}-{'9' * 10}-"[:58] + "x2b4z"
    query = pick(objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert re.fullmatch(re.search(r'pod=~"(.*)"', query)[1], pod)


def test_names_and_labels_stay_short_enough(render, ci_values):
    for one in render(ci_values | {"nameOverride": "a" * 63}, name="b" * 53):
        metadata = one["metadata"]
        words = [metadata["name"], *metadata["labels"].values()]
        assert max(map(len, words)) <= 63, one["kind"]


def test_a_monitor_replaces_the_annotations_for_prometheus(render):
    def annotations(values: Object) -> Object:
        template = pick(render(values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]

    assert annotations({})["prometheus.io/port"] == "1919"
    monitored = annotations({"metrics": {"podMonitor": {"enabled": True}}})
    assert not [name for name in monitored if name.startswith("prometheus.io")]


def test_service_monitor_finds_one_service(render):
    values = {"service": {"headless": True}, "metrics": {"serviceMonitor": {"enabled": True}}}
    objects = render(values)
    selector = pick(objects, "ServiceMonitor")["spec"]["selector"]
    services = [o for o in objects if o["kind"] == "Service"]
    assert len(services) == 2
    found = [one["spec"] for one in services if selects(selector, one["metadata"]["labels"])]
    assert [spec["type"] for spec in found] == ["ClusterIP"]
    assert pick(objects, "Service", "minisgl-pods")["spec"]["clusterIP"] == "None"


def test_monitors_scrape_the_named_port(render):
    for kind, field in (("podMonitor", "podMetricsEndpoints"), ("serviceMonitor", "endpoints")):
        values = {"enabled": True, "labels": {"release": "p"}, "scrapeTimeout": "9s"}
        objects = render({"metrics": {kind: values | {"honorLabels": True}}})
        monitor = pick(objects, kind[0].upper() + kind[1:])
        endpoint = monitor["spec"][field][0]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
        assert (endpoint["scrapeTimeout"], endpoint["honorLabels"]) == ("9s", True)
        assert monitor["metadata"]["labels"]["release"] == "p"


def test_dashboards_are_labelled_for_the_sidecar(render):
    objects = render({"dashboards": {"namespace": "grafana", "annotations": {"folder": "LLM"}}})
    config = pick(objects, "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["namespace"] == "grafana"
    written = {p.name: p.read_text().strip() for p in (CHART / "dashboards").glob("*.json")}
    assert config["data"] == written
    assert "ConfigMap" not in kinds(render({"dashboards": {"enabled": False}}))


def test_policy_admits_the_peers_and_the_test_pod(render):
    peer = {"podSelector": {"matchLabels": {"a": "b"}}}
    spec = pick(render({"networkPolicy": {"enabled": True, "from": [peer]}}), "NetworkPolicy")[
        "spec"
    ]
    assert spec["ingress"][0]["ports"] == [{"port": 1919, "protocol": "TCP"}]
    test_labels = pick(render(), "Pod")["metadata"]["labels"]
    peers = [one["podSelector"]["matchLabels"] for one in spec["ingress"][0]["from"]]
    assert peers[0] == {"a": "b"}
    assert peers[1].items() <= test_labels.items()
    assert len(peers) == 2
    assert [{p["port"] for p in rule["ports"]} for rule in spec["egress"]] == [{53}, {443}]


def test_the_backend_of_the_route_is_the_pool_if_it_is_enabled(render):
    route = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}}
    rule = pick(render(route), "HTTPRoute")["spec"]["rules"][0]
    assert rule["backendRefs"] == [{"name": "minisgl", "port": 1919}]
    objects = render({**route, "inferencePool": {"enabled": True}})
    rule = pick(objects, "HTTPRoute")["spec"]["rules"][0]
    assert rule["backendRefs"][0]["kind"] == "InferencePool"
    assert rule["backendRefs"][0]["name"] == pick(objects, "InferencePool")["metadata"]["name"]


def test_pool_selects_the_pods_and_their_port(render):
    objects = render({"inferencePool": {"enabled": True}})
    spec = pick(objects, "InferencePool")["spec"]
    labels = pick(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert spec["targetPorts"] == [{"number": container_of(objects)["ports"][0]["containerPort"]}]
    assert spec["endpointPickerRef"]["name"] == "minisgl-epp"


def test_picker_maps_the_metrics_by_the_label_of_the_pods(render):
    objects = render({"inferencePool": {"enabled": True}})
    config = yaml.safe_load(
        pick(objects, "ConfigMap", "minisgl-endpoint-picker")["data"]["minisgl.yaml"]
    )
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    engine = plugins["core-metrics-extractor"]["engineConfigs"][0]
    labels = pick(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert engine["name"] == labels["llm-d.ai/engine-type"]
    scored = [plugin["pluginRef"] for plugin in config["schedulingProfiles"][0]["plugins"]]
    assert set(scored) <= set(plugins)


def test_values_for_the_pickers_chart_agree_with_the_chart(render):
    values = yaml.safe_load((CHART / "endpoint-picker" / "router-values.yaml").read_text())
    router = values["router"]
    ours = (CHART / "endpoint-picker" / "config.yaml").read_text()
    assert router["epp"]["pluginsCustomConfig"] == {router["epp"]["pluginsConfigFile"]: ours}
    spec = pick(render({"inferencePool": {"enabled": True}}), "InferencePool")["spec"]
    assert router["modelServers"]["matchLabels"] == spec["selector"]["matchLabels"]
    assert router["modelServers"]["targetPorts"] == spec["targetPorts"]


PART_OF = {"app.kubernetes.io/part-of": "platform"}


def test_common_labels_are_on_every_object_and_take_precedence(render, ci_values):
    values = ci_values | {"commonLabels": PART_OF}
    for one in render(values):
        assert one["metadata"]["labels"].items() >= PART_OF.items(), one["kind"]


def test_the_more_specific_label_takes_precedence(render):
    scrape = {"prometheus.io/scrape": "false"}
    monitor = {"enabled": True, "labels": PART_OF}
    objects = render(
        {
            "commonLabels": {"app.kubernetes.io/part-of": "overridden"},
            "podLabels": PART_OF,
            "podAnnotations": scrape,
            "prometheusRule": {"enabled": True, "alertLabels": {"severity": "page"}},
        }
    )
    template = pick(objects, "Deployment")["spec"]["template"]["metadata"]
    assert template["labels"].items() >= PART_OF.items()
    assert template["annotations"].items() >= scrape.items()
    rule = pick(objects, "PrometheusRule")["spec"]["groups"][0]["rules"][0]
    assert rule["labels"]["severity"] == "page"
    objects = render({"metrics": {"podMonitor": monitor}})
    assert pick(objects, "PodMonitor")["metadata"]["labels"].items() >= PART_OF.items()


def test_the_secured_values_expose_only_routes_that_require_a_key(render):
    values = yaml.safe_load((CHART / "ci" / "secured-values.yaml").read_text())
    rules = pick(render(values), "Ingress")["spec"]["rules"]
    assert {path["path"] for rule in rules for path in rule["http"]["paths"]} == {"/v1"}


def test_the_test_pod_has_limits_that_a_quota_can_count(render):
    """A ResourceQuota on limits refuses a pod whose container has none."""
    resources = pick(render(), "Pod")["spec"]["containers"][0]["resources"]
    assert resources["limits"].keys() == resources["requests"].keys() == {"cpu", "memory"}
    given = {"limits": {"cpu": "2", "memory": "1Gi"}}
    own = render({"tests": {"resources": given}})
    resources = pick(own, "Pod")["spec"]["containers"][0]["resources"]
    assert resources["limits"] == given["limits"]


def test_ingress_serves_every_host(render):
    values = {"ingress": {"enabled": True, "hosts": ["a.example", "b.example"], "path": "/"}}
    spec = pick(render(values), "Ingress")["spec"]
    assert [rule["host"] for rule in spec["rules"]] == ["a.example", "b.example"]
    backend = spec["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "minisgl", "port": {"name": "http"}}


def test_notes_contain_the_url_and_not_the_key(notes):
    text = notes({"auth": {"apiKey": KEY}, "model": {"id": "Qwen/Qwen3-8B"}})
    assert "http://minisgl.llm.svc:1919/v1" in text
    assert "minisgl-api-key" in text
    assert KEY not in text


def test_notes_of_a_single_pod_say_how_to_avoid_the_pause_of_a_rollout(notes):
    assert "set replicas=2, or strategy.maxSurge=1 and strategy.maxUnavailable=0" in notes({})
    surge = {"strategy": {"maxSurge": 1, "maxUnavailable": 0}}
    for values in ({"replicas": 2}, surge, {"autoscaling": {"hpa": {"enabled": True}}}):
        assert "This release has one pod" not in notes(values)
    assert "This release has one pod" in notes(surge | {"strategy": {"type": "Recreate"}})


def test_notes_warn_of_an_api_without_a_key(notes):
    assert "requires no key" in notes({"service": {"type": "LoadBalancer"}})
    text = notes({"service": {"type": "LoadBalancer"}, "auth": {"keysSecret": "team-keys"}})
    assert "requires no key" not in text
    assert "from the Secret team-keys." in text


def test_notes_warn_against_a_change_of_the_name(notes):
    text = notes({"nameOverride": "chat"})
    assert "WARNING: nameOverride is part of the selectors" in text
    assert 'Keep "chat" as long as the' in text
    assert "nameOverride" not in notes({})
