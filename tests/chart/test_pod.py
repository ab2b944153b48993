"""The Deployment: selectors, probes, drain arithmetic, GPUs, volumes, security."""

import shutil

import pytest

from minisgl import __version__
from minisgl.settings.command_line import build_parser
from tests.chart.helm import CHART, KUBE_VERSION, ChartError, Object, pick


def engine_of(objects: list[Object]) -> Object:
    """The Deployment of the engine's pods. With render.enabled a release has a second one."""
    (found,) = (
        one
        for one in objects
        if one["kind"] == "Deployment" and not one["metadata"]["name"].endswith("-render")
    )
    return found


def pod_of(objects: list[Object]) -> Object:
    return engine_of(objects)["spec"]["template"]["spec"]


def container_of(objects: list[Object]) -> Object:
    return pod_of(objects)["containers"][0]


def flags_of(objects: list[Object]) -> dict[str, str]:
    pairs = (arg.partition("=") for arg in container_of(objects)["args"])
    return {flag: value for flag, _, value in pairs}


def selectors_of(objects: list[Object]) -> list[Object]:
    """Every selector of the release that selects the server's pods."""
    found = []
    for one in objects:
        if one["metadata"]["name"].endswith("-render"):
            continue
        match one["kind"]:
            case "Service":
                found.append(one["spec"]["selector"])
            case "PodMonitor" | "NetworkPolicy" if "matchExpressions" in str(one["spec"]):
                continue  # it selects the render pods too
            case "Deployment" | "PodDisruptionBudget" | "PodMonitor" | "InferencePool":
                found.append(one["spec"]["selector"]["matchLabels"])
            case "NetworkPolicy":
                found.append(one["spec"]["podSelector"]["matchLabels"])
    return found


def test_selectors_are_name_and_instance_only(render, ci_values):
    found = selectors_of(render(ci_values, name="chat"))
    assert len(found) >= 2
    expected = {"app.kubernetes.io/name": "minisgl", "app.kubernetes.io/instance": "chat"}
    assert all(selector == expected for selector in found)


def test_selectors_do_not_change_with_versions_and_labels(render, tmp_path):
    newer = tmp_path / "minisgl"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    text = text.replace(__version__, "9.9.9")
    (newer / "Chart.yaml").write_text(text)
    labels = {"commonLabels": {"team": "a"}, "podLabels": {"tier": "b"}, "replicas": 2}
    upgraded = render(labels, chart=newer)
    assert pick(upgraded, "Deployment")["metadata"]["labels"]["helm.sh/chart"] == "minisgl-9.9.9"
    assert selectors_of(upgraded)[:2] == selectors_of(render({"replicas": 2}))[:2]
    assert selectors_of(upgraded) == selectors_of(render({"replicas": 2}))


def test_a_new_chart_version_alone_restarts_no_pod(render, tmp_path):
    newer = tmp_path / "minisgl"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    text = text.replace(f"\nversion: {__version__}", "\nversion: 9.9.9")
    (newer / "Chart.yaml").write_text(text)
    secrets = {"auth": {"apiKey": "k"}, "huggingface": {"token": "t"}}
    pods = [
        pick(render(secrets, chart=c), "Deployment")["spec"]["template"] for c in (CHART, newer)
    ]
    assert pods[0] == pods[1]


def test_selectors_match_the_pods_and_not_the_test_pod(render):
    objects = render()
    selector = selectors_of(objects)[0].items()
    labels = pick(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert selector <= labels.items()
    assert not selector <= pick(objects, "Pod")["metadata"]["labels"].items()
    assert labels["llm-d.ai/engine-type"] == "minisgl"


def test_probes_use_the_port_and_the_routes_of_the_server(render, ci_values):
    container = container_of(render(ci_values))
    assert container["ports"][:2] == [
        {"name": "http", "containerPort": 1919},
        {"name": "probes", "containerPort": 1920},
    ]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if "Probe" in probe}
    assert paths == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert {container[probe]["httpGet"]["port"] for probe in paths} == {"probes"}
    flags = flags_of(render(ci_values))
    assert (flags["--port"], flags["--probe-port"]) == ("1919", "1920")


@pytest.mark.parametrize(("budget_s", "period_s"), [(1800, 5), (61, 10), (5, 5)])
def test_startup_probe_covers_its_budget(render, budget_s, period_s):
    values = {"startup": {"budgetSeconds": budget_s, "periodSeconds": period_s}}
    objects = render(values)
    probe = container_of(objects)["startupProbe"]
    covered_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert budget_s <= covered_s < budget_s + period_s
    assert pick(objects, "Deployment")["spec"]["progressDeadlineSeconds"] > covered_s


@pytest.mark.parametrize(
    ("pre_stop_s", "grace_s", "drain_s", "teardown_s"), [(0, 5, 60, 30), (10, 0, 300, 25)]
)
def test_grace_period_covers_the_whole_drain(render, pre_stop_s, grace_s, drain_s, teardown_s):
    drain = {
        "preStopSleepSeconds": pre_stop_s,
        "graceSeconds": grace_s,
        "timeoutSeconds": drain_s,
        "teardownSeconds": teardown_s,
    }
    objects = render({"drain": drain})
    period_s = pod_of(objects)["terminationGracePeriodSeconds"]
    assert period_s == pre_stop_s + drain_s + teardown_s  # timeoutSeconds includes graceSeconds
    flags = flags_of(objects)
    assert flags["--drain-grace"] == str(grace_s)
    assert flags["--drain-timeout"] == str(drain_s)
    hook = container_of(objects).get("lifecycle")
    assert hook == ({"preStop": {"sleep": {"seconds": pre_stop_s}}} if pre_stop_s else None)


def test_grace_period_may_be_longer(render):
    objects = render({"terminationGracePeriodSeconds": 600})
    assert pod_of(objects)["terminationGracePeriodSeconds"] == 600


def test_every_flag_is_known_to_the_server(render, ci_values):
    args = container_of(render(ci_values))["args"]
    options = build_parser().parse_strictly(args)
    assert getattr(options, "server.port") == 1919


def test_extra_args_refuses_flags_of_the_chart_under_every_name(render):
    values = {"model": {"id": "a/b", "revision": "c", "servedNames": ["d"]}}
    sized = {**values, "server": {"maxSeqLen": 2}}
    rendered = {flag for flag in flags_of(render(sized)) if flag.startswith("--")}
    aliases = {
        alias
        for action in build_parser()._actions
        if rendered & set(action.option_strings)
        for alias in action.option_strings
    }
    assert len(aliases) > len(rendered)
    for alias in sorted(aliases):
        with pytest.raises(ChartError, match=f"extraArgs contains {alias}, (which|but).*the chart"):
            render({"extraArgs": [f"{alias}=1"]})


def test_model_flags_follow_the_source_of_the_model(render):
    flags = flags_of(render({"model": {"id": "Qwen/Qwen3-8B", "revision": "abc"}}))
    assert (flags["--model"], flags["--revision"]) == ("Qwen/Qwen3-8B", "abc")
    claim = {"model": {"existingClaim": "models", "path": "/qwen/"}}
    assert flags_of(render(claim))["--model"] == "/model/qwen"
    assert flags_of(render({"model": {"image": "ghcr.io/example/m:1"}}))["--model"] == "/model"
    assert "--model" not in flags_of(render())


def test_the_dtype_of_the_kv_cache_is_passed_on(render):
    assert flags_of(render())["--kv-cache-dtype"] == "auto"
    fp8 = {"server": {"kvCacheDtype": "fp8"}}
    assert flags_of(render(fp8))["--kv-cache-dtype"] == "fp8"


@pytest.mark.parametrize(
    ("source", "volume"),
    [
        ({"existingClaim": "c"}, {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}),
        ({"hostPath": "/srv/m"}, {"hostPath": {"path": "/srv/m", "type": "Directory"}}),
        ({"image": "r/m:1"}, {"image": {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}}),
    ],
    ids=["claim", "host", "image"],
)
def test_model_volume_is_mounted_read_only(render, source, volume):
    objects = render({"model": source})
    volumes = {v.pop("name"): v for v in pod_of(objects)["volumes"]}
    assert volumes["model"] == volume
    mounts = {m["name"]: m for m in container_of(objects)["volumeMounts"]}
    assert mounts["model"]["readOnly"] is True


def test_gpus_follow_the_tensor_parallel_size(render):
    assert container_of(render())["resources"]["limits"] == {"nvidia.com/gpu": 1}
    objects = render({"tensorParallelSize": 8})
    assert container_of(objects)["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert flags_of(objects)["--tensor-parallel-size"] == "8"


@pytest.mark.parametrize(
    ("memory", "sum_bytes"),
    [("4Gi", 68_294_967_296), ("0.5G", 64_500_000_000), (1000, 64_000_001_000)],
)
def test_the_host_cache_counts_as_memory_of_the_pod(render, memory, sum_bytes):
    resources = {"requests": {"cpu": "2", "memory": memory}, "limits": {"memory": memory}}
    objects = render({"hostCache": {"sizeGB": 64}, "resources": resources})
    found = container_of(objects)["resources"]
    assert found["requests"] == {"cpu": "2", "memory": str(sum_bytes)}
    assert found["limits"] == {"nvidia.com/gpu": 1, "memory": str(sum_bytes)}
    assert flags_of(objects)["--host-cache-gb"] == "64"


def test_mig_slices_and_claims(render):
    mig = {"gpu": {"resourceName": "nvidia.com/mig-1g.10gb"}}
    assert container_of(render(mig))["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": 1}
    claim = {"name": "gpu", "resourceClaimTemplateName": "h200"}
    objects = render({"gpu": {"resourceName": ""}, "resourceClaims": [claim]})
    assert container_of(objects)["resources"]["claims"] == [{"name": "gpu"}]
    assert "limits" not in container_of(objects)["resources"]
    assert pod_of(objects)["resourceClaims"] == [claim]


def test_cpu_only_requests_no_gpu(render):
    objects = render({"gpu": {"enabled": False}, "tolerations": []})
    assert "nvidia" not in str(pick(objects, "Deployment"))
    assert flags_of(objects)["--device"] == "cpu"


def test_only_several_ranks_get_shared_memory(render):
    assert "shm" not in [v["name"] for v in pod_of(render())["volumes"]]
    objects = render({"tensorParallelSize": 2, "shm": {"size": "3Gi"}})
    volumes = {v.pop("name"): v for v in pod_of(objects)["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}
    mounts = {m["name"]: m["mountPath"] for m in container_of(objects)["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"


def test_pods_are_hardened(render, ci_values):
    for one in render(ci_values):
        if one["kind"] not in ("Deployment", "Pod"):
            continue
        pod = one["spec"]["template"]["spec"] if one["kind"] == "Deployment" else one["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_all_cache_folders_are_on_writable_mounts(render):
    container = container_of(render())
    mounts = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert sorted(mounts) == ["/cache", "/tmp"]
    folders = [e["value"] for e in container["env"] if e["value"].startswith("/")]
    assert len(folders) == 7
    assert all(folder.startswith("/cache") for folder in folders)


def test_service_account_token_is_not_mounted(render):
    assert pick(render(), "ServiceAccount")["automountServiceAccountToken"] is False
    none = render({"serviceAccount": {"create": False}})
    assert not [o for o in none if o["kind"] == "ServiceAccount"]
    assert pod_of(none)["serviceAccountName"] == "default"


def test_image_has_the_chart_version_by_default(render):
    assert container_of(render())["image"] == f"ghcr.io/minisgl/minisgl:{__version__}"
    digest = "sha256:" + "a" * 64
    objects = render({"image": {"tag": "1", "digest": digest, "repository": "r/m"}})
    assert container_of(objects)["image"] == f"r/m@{digest}"
    assert pick(objects, "Pod")["spec"]["containers"][0]["image"] == f"r/m@{digest}"


def test_rollout_needs_no_spare_gpu_by_default(render):
    spec = pick(render(), "Deployment")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert pick(render({"strategy": {"type": "Recreate"}}), "Deployment")["spec"]["strategy"] == {
        "type": "Recreate"
    }


def test_spread_without_a_selector_gets_the_selector_of_the_release(render):
    bare = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**bare, "labelSelector": {"matchLabels": {"a": "b"}}}
    spread = pod_of(render({"topologySpreadConstraints": [bare, own]}))["topologySpreadConstraints"]
    assert spread[0]["labelSelector"]["matchLabels"] == selectors_of(render())[0]
    assert spread[1] == own


def test_chart_names_the_oldest_kubernetes():
    assert f">={KUBE_VERSION}-0" in (CHART / "Chart.yaml").read_text()


def test_playground_is_off_unless_the_values_enable_it(render):
    assert "--no-playground" in container_of(render({}))["args"]
    enabled = render({"playground": {"enabled": True}})
    assert "--no-playground" not in container_of(enabled)["args"]


def test_origins_and_escaping_reach_the_server(render):
    plain = container_of(render({}))["args"]
    assert not {"--allow-origin", "--escape-special-tokens"} & set(plain)
    origins = ["https://a.example", "https://b.example"]
    server = {"escapeSpecialTokens": True, "allowedOrigins": origins}
    options = build_parser().parse_strictly(container_of(render({"server": server}))["args"])
    assert getattr(options, "server.allowed_origins") == origins
    assert getattr(options, "server.escape_special_tokens")
