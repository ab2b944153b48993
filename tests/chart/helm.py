"""Helm for the chart tests: the `helm` on PATH, else Helm 4 from the package helm-python-sdk.

Both render the same chart from the same values, and both raise ChartError for refused values.
"""

import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.patience import patience

__all__ = ["CHART", "KUBE_VERSION", "ChartError", "Helm", "Object", "find_helm", "pick", "selects"]

Object = dict[str, Any]
Values = dict[str, Any]

CHART = Path(__file__).resolve().parents[2] / "helm"
KUBE_VERSION = "1.30.0"  # some Helm versions assume an older Kubernetes than the chart allows


class ChartError(Exception):
    """Helm refused to render the chart; the message is Helm's output."""


class Helm(Protocol):
    """The functions of Helm that the tests use."""

    version: str

    def template(self, values: Values, *, name: str, namespace: str, chart: Path) -> dict[str, str]:
        """The rendered text by the path of the template inside the chart."""

    def lint(self, values: Values) -> list[str]:
        """The warnings and errors of `helm lint --strict`."""


class _Binary:
    def __init__(self, path: str) -> None:
        self._path = path
        self.version = self._run("version", "--short").strip()

    def template(self, values: Values, *, name: str, namespace: str, chart: Path) -> dict[str, str]:
        words = ("template", name, str(chart), "--namespace", namespace)
        out = self._run(*words, "--kube-version", KUBE_VERSION, values=values)
        texts: dict[str, str] = {}
        for part in out.split("\n---\n"):
            head, _, body = part.removeprefix("---\n").partition("\n")
            path = head.removeprefix("# Source: ")
            texts[path] = texts.get(path, "") + "\n---\n" + body
        return texts

    def lint(self, values: Values) -> list[str]:
        try:
            self._run("lint", "--strict", str(CHART), values=values)
        except ChartError as error:
            return [str(error)]
        return []

    def _run(self, *words: str, values: Values | None = None) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(values or {}, file)
            file.flush()
            given = () if values is None else ("--values", file.name)
            done = subprocess.run(
                [self._path, *words, *given], capture_output=True, text=True, timeout=patience()
            )
        if done.returncode:
            raise ChartError(done.stdout + done.stderr)
        return done.stdout


class _Library:
    def __init__(self) -> None:
        import helm_python

        self._helm = helm_python
        self._charts: dict[Path, Any] = {}
        self.version = helm_python.helm_sdk_version()

    def template(self, values: Values, *, name: str, namespace: str, chart: Path) -> dict[str, str]:
        try:
            if chart not in self._charts:
                self._charts[chart] = self._helm.Chart.load(chart)
            return self._charts[chart].render(values, name=name, namespace=namespace)
        except self._helm.HelmError as error:
            raise ChartError(str(error)) from error

    def lint(self, values: Values) -> list[str]:
        report = self._helm.lint(CHART, values, strict=True, kube_version=f"v{KUBE_VERSION}")
        # Severity 1 is a recommendation, 2 a warning, 3 an error.
        complaints = [m["error"] for m in report["messages"] if m["severity"] > 1]
        return [*report["errors"], *complaints]


def find_helm() -> Helm | None:
    """The installed Helm, or None if there is none."""
    if path := shutil.which("helm"):
        return _Binary(path)
    return _Library() if importlib.util.find_spec("helm_python") else None


class _Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys, as Kustomize and Flux do.

    The parser in C takes a tenth of the time of the one in Python.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Object:
        found = super().construct_mapping(node, deep)
        assert len(found) == len(node.value), f"a key occurs twice:\n{yaml.serialize(node)}"
        return found


def parse(texts: dict[str, str]) -> list[Object]:
    """The objects of all templates except NOTES.txt, which is not YAML."""
    manifests = (text for path, text in texts.items() if not path.endswith("NOTES.txt"))
    return [one for text in manifests for one in yaml.load_all(text, _Strict) if one]


def pick(objects: Iterable[Object], kind: str, name: str | None = None) -> Object:
    """The only object of that kind, or of that kind and name."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects of kind {kind}"
    return found[0]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a selector selects these labels. Its expressions have the operator In."""
    wanted = selector.get("matchLabels", {}).items()
    allowed = {one["key"]: one["values"] for one in selector.get("matchExpressions", [])}
    return wanted <= labels.items() and all(labels.get(k) in v for k, v in allowed.items())
