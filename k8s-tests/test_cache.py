"""The cache on a claim: a later pod finds the files that the first pod downloaded."""

import json

import pytest
from k8s_harness.client import ClientPod, require_whole, script_pod, start_scripts
from k8s_harness.kube import Kube
from k8s_harness.release import Release
from k8s_harness.values import cpu, merged

HUB_PORT = 8080
HUB = ["/scripts/hub.py", str(HUB_PORT)]


@pytest.fixture(scope="module")
def hub(namespace: Kube, image: str) -> str:
    """The URL of a hub in the cluster that serves the demo model as owner/demo."""
    start_scripts(namespace, script_pod("hub", image, HUB, HUB_PORT))
    return f"http://{namespace.need('Pod', 'hub')['status']['podIP']}:{HUB_PORT}"


@pytest.fixture(scope="module")
def release(install, image, hub: str) -> Release:
    values = cpu(image, model={"id": "owner/demo", "servedNames": ["minisgl-demo"]})
    values["cache"] = {"enabled": True, "size": "1Gi"}
    values["extraEnv"] = [*values["extraEnv"], {"name": "HF_ENDPOINT", "value": hub}]
    return install(values).wait_ready()


def fetched(client: ClientPod, hub: str) -> list[str]:
    code = f"import urllib.request; print(urllib.request.urlopen('{hub}/fetched').read().decode())"
    names: list[str] = json.loads(client.python(code))
    return names


def require_service(release: Release, client: ClientPod) -> None:
    with client.load(release.url, [20, 20]) as load:
        require_whole(load.stop(), 2)


def test_the_first_pod_downloads(release: Release, client: ClientPod, hub: str) -> None:
    names = fetched(client, hub)
    assert "model.safetensors" in names
    assert len(names) == len(set(names))
    require_service(release, client)


def test_a_later_pod_finds_the_files(release: Release, client: ClientPod, hub: str) -> None:
    before = fetched(client, hub)
    old = release.the_pod()
    release.restart()
    release.wait_ready()
    assert release.the_pod() != old
    assert fetched(client, hub) == before
    require_service(release, client)


def test_a_pod_starts_from_the_cache_without_a_hub(
    release: Release, client: ClientPod, namespace: Kube
) -> None:
    namespace.delete("Pod", "hub")
    release.upgrade(merged(release.values, {"huggingface": {"offline": True}}))
    release.wait_ready()
    require_service(release, client)
