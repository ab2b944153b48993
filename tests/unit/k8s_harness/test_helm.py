"""Command lines of Helm 3 and Helm 4. tests/chart covers helm-python-sdk."""

import json
from pathlib import Path

import pytest
from k8s_harness.helm import CHART, HelmBinary, HelmFailed
from k8s_harness.providers import Access

from tests.unit.k8s_harness.commands import FAILED, Recorder

AT = "--namespace ns --kube-context lab --kubeconfig k"


def program(version: str, **answers: str) -> tuple[HelmBinary, Recorder]:
    run = Recorder({"helm version": f"{version}\n", **answers})
    return HelmBinary(Access("k", "lab"), "ns", run), run


def test_values_are_passed_in_a_temporary_file() -> None:
    helm, run = program("v3.6.2+gee407bd")
    seen: list[object] = []
    run.on_run = lambda line: seen.append(json.loads(Path(line.split()[-1]).read_text()))
    helm.install("minisgl", {"replicas": 2})
    words, _, file = run.lines[-1].rpartition(" ")
    assert words == f"helm install minisgl {CHART} {AT} --values"
    assert seen == [{"replicas": 2}]
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("version", "flag"), [("v3.6.2+gee407bd", "--atomic"), ("v4.2.3", "--rollback-on-failure")]
)
def test_an_atomic_upgrade_has_the_flag_of_its_helm_version(version: str, flag: str) -> None:
    helm, run = program(version)
    helm.upgrade("minisgl", {}, atomic_s=60)
    assert run.lines[-1].startswith(f"helm upgrade minisgl {CHART} {flag} --timeout 60s {AT}")


def test_the_other_helm_commands_have_their_arguments() -> None:
    helm, run = program("v3.6.2", **{"helm history": '[{"revision": 1, "status": "deployed"}]'})
    helm.upgrade("minisgl", {})
    helm.rollback("minisgl")
    helm.uninstall("minisgl")
    helm.test("minisgl")
    assert helm.history("minisgl") == [{"revision": 1, "status": "deployed"}]
    assert "--atomic" not in run.lines[1]
    assert run.lines[2:] == [
        f"helm rollback minisgl {AT}",
        f"helm uninstall minisgl {AT}",
        f"helm test minisgl {AT}",
        f"helm history minisgl --output json {AT}",
    ]


def test_a_failure_contains_the_output_of_helm() -> None:
    run = Recorder({"helm version": "v4.2.3", "helm rollback": FAILED})
    with pytest.raises(HelmFailed, match=str(FAILED)):
        HelmBinary(Access(None, "lab"), "ns", run).rollback("minisgl")
    assert run.lines[-1] == "helm rollback minisgl --namespace ns --kube-context lab"
