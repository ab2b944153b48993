"""The command-line options of the cluster tests, and the checks of their combinations."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CPU_IMAGE", "Settings", "SettingsError"]

CPU_IMAGE = "ghcr.io/minisgl/minisgl:0.2.0-cpu"  # as in helm/ci/cpu-demo-values.yaml


class SettingsError(Exception):
    """The options contradict each other. The message contains the remedy."""


@dataclass(frozen=True)
class Settings:
    """
    provider         "kind" creates a cluster, "existing" uses the cluster of `context`.
    context          kubeconfig context of an existing cluster; there is no default.
    kubeconfig       kubeconfig file of an existing cluster; None: KUBECONFIG or the default file.
    cluster_name     name of the kind cluster.
    reuse            use the kind cluster of that name if it exists, and keep it afterwards.
    keep_on_failure  keep the namespaces of failed tests, and a kind cluster that was created.
    artifacts        folder for events, objects and logs of failed tests.
    image            image of the server, REPOSITORY:TAG.
    skip_build       do not build the image. Docker must have it, or the nodes if neither
                     load_command nor registry is set.
    load_command     command that loads the image into an existing cluster; it contains {image} or
                     {archive} (the file of `docker save`).
    registry         push the image to this registry, from which the nodes of an existing cluster
                     pull it.
    gpu_image        image of the GPU build, for the tests that need a GPU.
    reach            access to a Service from this machine: "clusterip", "forward", or "auto".
    """

    provider: str = "kind"
    context: str | None = None
    kubeconfig: str | None = None
    cluster_name: str = "minisgl-k8s-tests"
    reuse: bool = False
    keep_on_failure: bool = False
    artifacts: Path = Path("build/k8s-artifacts")
    image: str = CPU_IMAGE
    skip_build: bool = False
    load_command: str | None = None
    registry: str | None = None
    gpu_image: str | None = None
    reach: str = "auto"

    def __post_init__(self) -> None:
        existing_only = {
            "--context": self.context,
            "--kubeconfig": self.kubeconfig,
            "--load-command": self.load_command,
            "--registry": self.registry,
        }
        if self.provider == "existing":
            if not self.context:
                raise SettingsError(
                    "--provider existing needs --context NAME, which has no default"
                )
            if self.reuse:
                raise SettingsError(
                    "--reuse is only for kind: the tests never delete an existing cluster"
                )
            if self.load_command and self.registry:
                raise SettingsError(
                    "--load-command and --registry both bring the image to the nodes: keep one"
                )
            if not (self.load_command or self.registry or self.skip_build):
                raise SettingsError(
                    "an existing cluster needs --load-command or --registry for the image that is "
                    "built here, or --skip-build if its nodes have the image"
                )
        elif given := [flag for flag, value in existing_only.items() if value]:
            raise SettingsError(f"{', '.join(given)}: only allowed with --provider existing")
        repository, colon, tag = self.image.rpartition(":")
        if not colon or not repository or "/" in tag:
            raise SettingsError(f"--image {self.image} has no tag: write REPOSITORY:TAG")
        if tag == "latest":
            raise SettingsError(
                f"--image {self.image}: nodes always pull :latest again, so choose another tag"
            )
