"""The checks of a cluster's features report the missing feature."""

from pathlib import Path
from typing import Any

import pytest
from k8s_harness.capabilities import gpu, loadbalancer, metrics

from tests.unit.k8s_harness.replies import DISCOVERY, group, listing, replayed

NS = "/api/v1/namespaces/default"


def serving(*groups: dict[str, Any]) -> dict[str, Any]:
    core = group(None, "v1", Node="nodes", Service="services")
    core["versions"][0]["resources"][0]["scope"] = "Cluster"
    apis = {"items": [*DISCOVERY["/apis"]["items"], *groups]}
    return {"GET /api": {"items": [core]}, "GET /apis": apis}


@pytest.mark.parametrize(
    ("offered", "image", "lacking"),
    [
        ({}, "minisgl:gpu", "no node offers nvidia.com/gpu"),
        ({"nvidia.com/gpu": "0"}, "minisgl:gpu", "no node offers nvidia.com/gpu"),
        ({"nvidia.com/gpu": "8"}, None, "--gpu-image names no image of the GPU build"),
        ({"nvidia.com/gpu": "8"}, "minisgl:gpu", None),
    ],
)
def test_a_gpu_needs_a_node_and_an_image(
    tmp_path: Path, offered: dict[str, str], image: str | None, lacking: str | None
) -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "2", **offered}}}
    with replayed(tmp_path, {**serving(), "GET /api/v1/nodes": listing(node)}) as (kube, _):
        assert gpu(kube, image) == lacking


def test_metrics_need_their_api(tmp_path: Path) -> None:
    with replayed(tmp_path, serving()) as (kube, _):
        assert "no metrics-server" in (metrics(kube) or "")
    with replayed(tmp_path, serving(group("metrics.k8s.io", "v1beta1", PodMetrics="pods"))) as (
        kube,
        _,
    ):
        assert metrics(kube) is None


def test_a_load_balancer_is_checked_with_a_service(tmp_path: Path) -> None:
    ingress = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
    service = {"metadata": {"name": "probe"}, "status": ingress}
    answers = {f"POST {NS}/services": service, f"GET {NS}/services": listing(service)}
    with replayed(tmp_path, {**serving(), **answers}) as (kube, server):
        assert loadbalancer(kube) is None
        assert '"type": "LoadBalancer"' in server.asked[2]
