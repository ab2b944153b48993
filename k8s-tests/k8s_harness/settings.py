"""What the command line of pytest says, checked as a whole."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CPU_IMAGE", "Settings", "SettingsError"]

CPU_IMAGE = "ghcr.io/minisgl/minisgl:0.1.0-cpu"  # as in helm/ci/cpu-demo-values.yaml


class SettingsError(Exception):
    """Options that contradict each other; the message says the remedy."""


@dataclass(frozen=True)
class Settings:
    """
    provider         "kind" makes a cluster of its own, "existing" uses the one of `context`.
    context          kubeconfig context, for an existing cluster only and never by default.
    kubeconfig       kubeconfig file of an existing cluster; None: KUBECONFIG or the user's own.
    cluster_name     name of kind's cluster.
    reuse            take kind's cluster of that name if it is there, and leave it there.
    keep_on_failure  leave namespaces with failed tests, and a kind cluster that we made.
    artifacts        folder for what a failed test leaves to read.
    image            image of the server, REPOSITORY:TAG.
    skip_build       the image is there: in Docker, or in the cluster if it is not loaded either.
    load_command     for an existing cluster, with {image} or {archive} (`docker save`) in it.
    registry         for an existing cluster: push the image there, and let the nodes pull it.
    gpu_image        image of the GPU build, for the tests that need a GPU.
    reach            how this machine reaches a Service: "clusterip", "forward", or "auto".
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
                raise SettingsError("--provider existing needs --context NAME: no cluster by luck")
            if self.reuse:
                raise SettingsError("--reuse is for kind: an existing cluster is never deleted")
            if self.load_command and self.registry:
                raise SettingsError("--load-command and --registry are two ways: keep one")
            if not (self.load_command or self.registry or self.skip_build):
                raise SettingsError(
                    "an image that is built here gets into an existing cluster by --load-command "
                    "or --registry; where it is there already, --skip-build"
                )
        elif given := [flag for flag, value in existing_only.items() if value]:
            raise SettingsError(f"{', '.join(given)}: only with --provider existing")
        repository, colon, tag = self.image.rpartition(":")
        if not colon or not repository or "/" in tag:
            raise SettingsError(f"--image {self.image}: write REPOSITORY:TAG")
        if tag == "latest":
            raise SettingsError(f"--image {self.image}: nodes pull :latest anew, choose a tag")
