"""Options that contradict each other are refused with the remedy."""

import pytest
from k8s_harness.settings import CPU_IMAGE, Settings, SettingsError

from tests.chart.helm import CHART

EXISTING = {"provider": "existing", "context": "lab", "skip_build": True}


def test_the_default_is_a_kind_cluster() -> None:
    settings = Settings()
    assert (settings.provider, settings.context, settings.image) == ("kind", None, CPU_IMAGE)


def test_the_default_image_is_the_chart_s() -> None:
    text = (CHART / "ci" / "cpu-demo-values.yaml").read_text()
    assert f"tag: {CPU_IMAGE.rpartition(':')[2]}\n" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"provider": "existing", "skip_build": True}, "--context NAME"),
        ({"provider": "existing", "context": "", "skip_build": True}, "--context NAME"),
        ({**EXISTING, "skip_build": False}, "--load-command or --registry"),
        ({**EXISTING, "reuse": True}, "never delete an existing cluster"),
        ({**EXISTING, "load_command": "load {archive}", "registry": "r"}, "keep one"),
        ({"context": "lab"}, "--context: only allowed with --provider existing"),
        ({"registry": "r", "kubeconfig": "k"}, "--kubeconfig, --registry: only allowed"),
        ({"image": "minisgl"}, "REPOSITORY:TAG"),
        ({"image": "host:5000/minisgl"}, "REPOSITORY:TAG"),
        ({"image": "minisgl:latest"}, "always pull :latest again"),
    ],
)
def test_contradictions_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings(**given)  # type: ignore[arg-type]


def test_an_existing_cluster_is_used_with_its_context() -> None:
    assert Settings(**EXISTING, image="host:5000/minisgl:1").context == "lab"  # type: ignore[arg-type]
