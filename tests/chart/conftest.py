"""Fixtures that render the chart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, Helm, Object, find_helm, parse

Render = Callable[..., list[Object]]
Notes = Callable[[Object], str]
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


@pytest.fixture(scope="session")
def helm() -> Helm:
    found = find_helm()
    if found is None:
        pytest.skip("no helm on PATH and no helm-python-sdk: pip install '.[chart]'")
    return found


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """render({...values}) returns the objects of a release."""

    def rendered(
        values: dict[str, object] | None = None,
        name: str = "minisgl",
        namespace: str = "llm",
        chart: Path = CHART,
    ) -> list[Object]:
        return parse(helm.template(values or {}, name=name, namespace=namespace, chart=chart))

    return rendered


@pytest.fixture(params=CI_FILES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def ci_values(request: pytest.FixtureRequest) -> dict[str, object]:
    """The values of one file in helm/ci."""
    return yaml.safe_load(request.param.read_text()) or {}


@pytest.fixture
def notes(helm: Helm) -> Notes:
    """notes({...values}) gives the text that an installation prints."""

    def rendered(values: Object) -> str:
        texts = helm.template(values, name="minisgl", namespace="llm", chart=CHART)
        if "minisgl/templates/NOTES.txt" not in texts:
            pytest.skip("this Helm renders no notes without a cluster")
        return texts["minisgl/templates/NOTES.txt"]

    return rendered
