"""How the helm program is called, version 3 and 4; its library is called in tests/chart."""

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


def test_values_go_in_a_file_that_is_gone_afterwards() -> None:
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
def test_an_upgrade_may_roll_itself_back(version: str, flag: str) -> None:
    helm, run = program(version)
    helm.upgrade("minisgl", {}, atomic_s=60)
    assert run.lines[-1].startswith(f"helm upgrade minisgl {CHART} {flag} --timeout 60s {AT}")


def test_the_other_verbs() -> None:
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


def test_its_words_are_kept_when_it_fails() -> None:
    run = Recorder({"helm version": "v4.2.3", "helm rollback": FAILED})
    with pytest.raises(HelmFailed, match=str(FAILED)):
        HelmBinary(Access(None, "lab"), "ns", run).rollback("minisgl")
    assert run.lines[-1] == "helm rollback minisgl --namespace ns --kube-context lab"
