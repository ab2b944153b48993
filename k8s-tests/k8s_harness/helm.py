"""Helm for the cluster tests: the `helm` on PATH (3 or 4), else Helm 4 from helm-python-sdk."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from k8s_harness.objects import Object
from k8s_harness.providers import Access
from k8s_harness.shell import CommandFailed, Run

__all__ = ["CHART", "Helm", "HelmFailed", "HelmMissing", "find_helm"]

CHART = Path(__file__).resolve().parents[2] / "helm"
HOOK_TIMEOUT_S = 300


class HelmFailed(Exception):
    """A Helm command failed; the message is Helm's output."""


class HelmMissing(Exception):
    """Neither a `helm` program nor helm-python-sdk is installed."""


class Helm(Protocol):
    """Helm in one namespace of one cluster. Each method raises HelmFailed if the command fails."""

    version: str

    def install(self, name: str, values: Object) -> None:
        """Installs without waiting, because the waits of the harness report more than Helm's."""

    def upgrade(self, name: str, values: Object, atomic_s: int | None = None) -> None:
        """atomic_s: wait this long for readiness, then roll back."""

    def rollback(self, name: str) -> None:
        """Rolls back to the previous revision."""

    def uninstall(self, name: str) -> None: ...

    def test(self, name: str) -> None: ...

    def history(self, name: str) -> list[Object]:
        """The revisions with their status, the oldest first."""


class HelmBinary:
    """The `helm` program."""

    def __init__(self, access: Access, namespace: str, run: Run) -> None:
        self._run = run
        at = ["--namespace", namespace, "--kube-context", access.context]
        self._at = [*at, "--kubeconfig", access.kubeconfig] if access.kubeconfig else at
        self.version = run("helm", "version", "--short").strip()
        is_3 = self.version.startswith("v3")
        self._atomic = "--atomic" if is_3 else "--rollback-on-failure"

    def install(self, name: str, values: Object) -> None:
        self._act("install", name, str(CHART), values=values)

    def upgrade(self, name: str, values: Object, atomic_s: int | None = None) -> None:
        atomic = [] if atomic_s is None else [self._atomic, "--timeout", f"{atomic_s}s"]
        self._act("upgrade", name, str(CHART), *atomic, values=values, timeout_s=atomic_s)

    def rollback(self, name: str) -> None:
        self._act("rollback", name)

    def uninstall(self, name: str) -> None:
        self._act("uninstall", name)

    def test(self, name: str) -> None:
        self._act("test", name, timeout_s=HOOK_TIMEOUT_S)

    def history(self, name: str) -> list[Object]:
        found: list[Object] = json.loads(self._act("history", name, "--output", "json"))
        return found

    def _act(self, *words: str, values: Object | None = None, timeout_s: int | None = None) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(values, file)
            file.flush()
            given = [] if values is None else ["--values", file.name]
            try:
                # An atomic upgrade waits up to twice: for the upgrade and for the rollback.
                limit_s = 120 + 2 * (timeout_s or 0)
                return self._run("helm", *words, *self._at, *given, timeout_s=limit_s)
            except CommandFailed as error:
                raise HelmFailed(str(error)) from error


class HelmLibrary:
    """Helm 4 inside this process, from helm-python-sdk."""

    def __init__(self, access: Access, namespace: str) -> None:
        import helm_python

        self._error = helm_python.HelmError
        self._config = helm_python.Config(
            kubeconfig_path=access.kubeconfig, kube_context=access.context, namespace=namespace
        )
        self._namespace = namespace
        self.version = f"{helm_python.helm_sdk_version()} (helm-python-sdk)"

    def install(self, name: str, values: Object) -> None:
        self._act(self._config.install, CHART, name, values, namespace=self._namespace)

    def upgrade(self, name: str, values: Object, atomic_s: int | None = None) -> None:
        how: Object = {"namespace": self._namespace}
        if atomic_s is not None:
            how |= {"rollback_on_failure": True, "wait": "watcher", "timeout": atomic_s}
        self._act(self._config.upgrade, CHART, name, values, **how)

    def rollback(self, name: str) -> None:
        self._act(self._config.rollback, name)

    def uninstall(self, name: str) -> None:
        self._act(self._config.uninstall, name)

    def test(self, name: str) -> None:
        self._act(self._config.test, name, timeout=HOOK_TIMEOUT_S, logs=True)

    def history(self, name: str) -> list[Object]:
        found: list[Object] = self._act(self._config.history, name)
        return found

    def _act(self, action: Callable[..., Any], *words: Any, **more: Any) -> Any:
        try:
            return action(*words, **more)
        except self._error as error:
            raise HelmFailed(str(error)) from error


def find_helm(access: Access, namespace: str, run: Run) -> Helm:
    """The installed Helm. Raises HelmMissing if there is none."""
    if shutil.which("helm"):
        return HelmBinary(access, namespace, run)
    if importlib.util.find_spec("helm_python"):
        return HelmLibrary(access, namespace)
    raise HelmMissing("there is no helm on PATH and no helm-python-sdk: pip install '.[chart]'")
