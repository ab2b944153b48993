"""The cluster of the tests: a kind cluster that the tests create and delete, or an existing one.

A provider deletes only the clusters that it has created.
"""

import shlex
from pathlib import Path
from typing import NamedTuple, Protocol

from k8s_harness.image import COPY_TIMEOUT_S, push, save
from k8s_harness.settings import Settings
from k8s_harness.shell import CommandFailed, Run

__all__ = ["Access", "ClusterProvider", "Existing", "Kind", "ProviderError", "provider_for"]

# From kind's release 0.33.0. The digest pins the image, because kind may publish another image
# under this tag.
NODE_IMAGE = (
    "kindest/node:v1.36.4@sha256:099e049362a1526b2db71494e1947aae99bd16290d7c895f2b7ea312e3cbfaed"
)
CREATE_TIMEOUT_S = 900


class ProviderError(Exception):
    """The cluster cannot be used. The message contains the remedy."""


class Access(NamedTuple):
    """Kubeconfig file and context. kubeconfig None: KUBECONFIG, or the user's default file."""

    kubeconfig: str | None
    context: str


class ClusterProvider(Protocol):
    """Prepares a cluster for one run of the tests and cleans up after it."""

    def ensure(self) -> Access:
        """Returns the access to the cluster. Raises ProviderError or CommandFailed."""

    def load_image(self, image: str) -> str:
        """Makes the image available to the nodes. Returns the name that pods use."""

    def teardown(self, failed: bool) -> None:
        """Deletes the cluster that `ensure` created. failed: at least one test has failed."""


class Kind:
    """A kind cluster with a separate kubeconfig, so that the user's file does not change."""

    def __init__(self, settings: Settings, folder: Path, config: Path, run: Run) -> None:
        self._settings = settings
        self._folder = folder
        self._config = config
        self._run = run
        self._created = False

    def ensure(self) -> Access:
        name = self._settings.cluster_name
        kubeconfig = str(self._folder / "kubeconfig")
        there = name in self._run("kind", "get", "clusters").split()
        if there and not self._settings.reuse:
            raise ProviderError(
                f"a kind cluster named {name} exists: pass --reuse, or another --cluster-name"
            )
        at = ("--name", name, "--kubeconfig", kubeconfig)
        if there:
            self._run("kind", "export", "kubeconfig", *at)
        else:
            self._created = True  # set first, so that teardown also deletes an incomplete cluster
            chosen = ("--image", NODE_IMAGE, "--config", str(self._config))
            create = ("kind", "create", "cluster", *at, *chosen, "--wait", "180s", "--retain")
            self._run(*create, timeout_s=CREATE_TIMEOUT_S)
        return Access(kubeconfig, f"kind-{name}")

    def load_image(self, image: str) -> str:
        """Loads an archive, because `kind load docker-image` fails for multi-platform images."""
        archive = save(image, self._folder, self._run)
        load = ("kind", "load", "image-archive", str(archive))
        self._run(*load, "--name", self._settings.cluster_name, timeout_s=COPY_TIMEOUT_S)
        archive.unlink(missing_ok=True)
        return image

    def teardown(self, failed: bool) -> None:
        settings = self._settings
        if failed:
            folder = settings.artifacts / "kind"
            folder.mkdir(parents=True, exist_ok=True)
            export = ("kind", "export", "logs", str(folder), "--name", settings.cluster_name)
            try:
                self._run(*export, timeout_s=300)
            except CommandFailed as error:  # delete the cluster in any case
                (folder / "export-failed.txt").write_text(str(error))
        if self._created and not settings.reuse and not (failed and settings.keep_on_failure):
            self._run("kind", "delete", "cluster", "--name", settings.cluster_name)


class Existing:
    """An existing cluster. The tests create and delete namespaces in it and change nothing else."""

    def __init__(self, settings: Settings, folder: Path, run: Run) -> None:
        self._settings = settings
        self._folder = folder
        self._run = run

    def ensure(self) -> Access:
        if self._settings.context is None:
            raise ProviderError("--provider existing needs --context NAME")
        return Access(self._settings.kubeconfig, self._settings.context)

    def load_image(self, image: str) -> str:
        if self._settings.registry:
            return push(image, self._settings.registry, self._run)
        if command := self._settings.load_command:
            archive = save(image, self._folder, self._run) if "{archive}" in command else None
            words = [
                word.replace("{image}", image).replace("{archive}", str(archive))
                for word in shlex.split(command)
            ]
            self._run(*words, timeout_s=COPY_TIMEOUT_S)
            if archive is not None:
                archive.unlink(missing_ok=True)
        return image

    def teardown(self, failed: bool) -> None:
        """Nothing to delete: the tests delete their namespaces themselves."""


def provider_for(settings: Settings, folder: Path, config: Path, run: Run) -> ClusterProvider:
    """The provider that the settings name. folder: empty; config: kind's configuration file."""
    if settings.provider == "existing":
        return Existing(settings, folder, run)
    return Kind(settings, folder, config, run)
