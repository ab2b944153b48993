"""Commands of the providers that create, load and delete."""

import re
from pathlib import Path

import pytest
import yaml
from k8s_harness.providers import NODE_IMAGE, Access, Existing, Kind, ProviderError, provider_for
from k8s_harness.settings import Settings
from k8s_harness.shell import CommandFailed

from tests.unit.k8s_harness.commands import FAILED, Recorder

CONFIG = Path(__file__).resolve().parents[3] / "k8s-tests" / "kind.yaml"
NAME = "minisgl-k8s-tests"


def kind(run: Recorder, folder: Path, **more: object) -> Kind:
    settings = Settings(artifacts=folder / "artifacts", **more)  # type: ignore[arg-type]
    return Kind(settings, folder, CONFIG, run)


def existing(run: Recorder, folder: Path, **more: object) -> Existing:
    settings = Settings(provider="existing", context="lab", skip_build=True, **more)  # type: ignore[arg-type]
    return Existing(settings, folder, run)


def test_the_node_image_is_pinned_and_the_config_is_for_kind() -> None:
    assert re.fullmatch(r"kindest/node:v1\.\d+\.\d+@sha256:[0-9a-f]{64}", NODE_IMAGE)
    config = yaml.safe_load(CONFIG.read_text())
    assert (config["kind"], config["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert [node["role"] for node in config["nodes"]] == ["control-plane"]


def test_kind_creates_with_pinned_image_and_separate_kubeconfig(tmp_path: Path) -> None:
    run = Recorder({"kind get clusters": "other\n"})
    assert kind(run, tmp_path).ensure() == Access(f"{tmp_path}/kubeconfig", f"kind-{NAME}")
    assert run.lines == [
        "kind get clusters",
        f"kind create cluster --name {NAME} --kubeconfig {tmp_path}/kubeconfig "
        f"--image {NODE_IMAGE} --config {CONFIG} --wait 180s --retain",
    ]


def test_kind_does_not_touch_an_existing_cluster_of_its_name(tmp_path: Path) -> None:
    run = Recorder({"kind get clusters": f"a\n{NAME}\n"})
    provider = kind(run, tmp_path)
    with pytest.raises(ProviderError, match="--reuse"):
        provider.ensure()
    provider.teardown(failed=True)
    assert not [line for line in run.lines if "create" in line or "delete" in line]


def test_reuse_keeps_the_cluster(tmp_path: Path) -> None:
    run = Recorder({"kind get clusters": f"{NAME}\n"})
    provider = kind(run, tmp_path, reuse=True)
    provider.ensure()
    provider.teardown(failed=False)
    at = f"--name {NAME} --kubeconfig {tmp_path}/kubeconfig"
    assert run.lines == ["kind get clusters", f"kind export kubeconfig {at}"]


@pytest.mark.parametrize(
    ("failed", "more", "is_deleted"),
    [
        (False, {}, True),
        (True, {}, True),
        (True, {"keep_on_failure": True}, False),
        (False, {"keep_on_failure": True}, True),
        (False, {"reuse": True}, False),
    ],
)
def test_kind_deletes_only_a_cluster_that_it_created(
    tmp_path: Path, failed: bool, more: dict[str, object], is_deleted: bool
) -> None:
    run = Recorder()
    provider = kind(run, tmp_path, **more)
    provider.ensure()
    del run.lines[:]
    provider.teardown(failed)
    delete = f"kind delete cluster --name {NAME}"
    export = f"kind export logs {tmp_path}/artifacts/kind --name {NAME}"
    assert run.lines == [export] * failed + [delete] * is_deleted


def test_an_incomplete_cluster_is_deleted_even_if_its_logs_cannot_be_exported(
    tmp_path: Path,
) -> None:
    run = Recorder({"kind create": FAILED, "kind export logs": FAILED})
    provider = kind(run, tmp_path)
    with pytest.raises(CommandFailed):
        provider.ensure()
    provider.teardown(failed=True)
    assert run.lines[-1] == f"kind delete cluster --name {NAME}"
    assert (tmp_path / "artifacts/kind/export-failed.txt").read_text() == str(FAILED)


def test_kind_loads_an_archive(tmp_path: Path) -> None:
    run = Recorder()
    assert kind(run, tmp_path).load_image("minisgl:1") == "minisgl:1"
    assert run.lines == [
        f"docker save --output {tmp_path}/image.tar minisgl:1",
        f"kind load image-archive {tmp_path}/image.tar --name {NAME}",
    ]


def test_existing_runs_no_command_without_load_command(tmp_path: Path) -> None:
    run = Recorder()
    provider = existing(run, tmp_path, kubeconfig="k")
    assert provider.ensure() == Access("k", "lab")
    assert provider.load_image("minisgl:1") == "minisgl:1"
    provider.teardown(failed=True)
    assert run.lines == []


def test_existing_runs_the_given_load_command(tmp_path: Path) -> None:
    run = Recorder()
    existing(run, tmp_path, load_command="minikube image load {image}").load_image("minisgl:1")
    ctr = "ssh node 'ctr -n k8s.io images import {archive}'"
    existing(run, tmp_path, load_command=ctr).load_image("minisgl:1")
    assert run.lines == [
        "minikube image load minisgl:1",
        f"docker save --output {tmp_path}/image.tar minisgl:1",
        f"ssh node ctr -n k8s.io images import {tmp_path}/image.tar",
    ]


def test_existing_pushes_to_a_registry_and_pulls_from_there(tmp_path: Path) -> None:
    run = Recorder()
    there = existing(run, tmp_path, registry="host:5000/team/").load_image("ghcr.io/m/minisgl:1")
    assert there == "host:5000/team/minisgl:1"
    assert run.lines == [f"docker tag ghcr.io/m/minisgl:1 {there}", f"docker push {there}"]


def test_the_settings_choose_the_provider(tmp_path: Path) -> None:
    lab = Settings(provider="existing", context="lab", skip_build=True)
    assert isinstance(provider_for(lab, tmp_path, CONFIG, Recorder()), Existing)
    assert isinstance(provider_for(Settings(), tmp_path, CONFIG, Recorder()), Kind)
