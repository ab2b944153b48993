"""skaffold.yaml agrees with the chart. The tests do not run skaffold."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "skaffold.yaml").read_text())


def test_release_installs_this_chart_with_the_built_image():
    release = CONFIG["deploy"]["helm"]["releases"][0]
    assert (ROOT / release["chartPath"] / "Chart.yaml").is_file()
    image = CONFIG["build"]["artifacts"][0]["image"]
    assert release["setValueTemplates"] == {
        "image.repository": f"{{{{.IMAGE_REPO_{image}}}}}",
        "image.tag": f"{{{{.IMAGE_TAG_{image}}}}}",
    }


def test_profiles_use_values_files_that_ci_renders():
    files = [CONFIG["deploy"]["helm"]["releases"][0]["valuesFiles"][0]]
    profiles = {profile["name"]: profile for profile in CONFIG["profiles"]}
    assert set(profiles) == {"cpu", "gpu"}
    files += [patch["value"] for patch in profiles["cpu"]["patches"]]
    assert all((ROOT / path).is_file() for path in files)
    assert files[-1] == "helm/ci/cpu-demo-values.yaml"


def test_every_build_uses_buildkit():
    """RUN --mount needs BuildKit. A profile replaces the whole of `local`, so each sets it."""
    builds = [CONFIG["build"], *(profile["build"] for profile in CONFIG["profiles"])]
    assert [build["local"]["useBuildkit"] for build in builds] == [True] * 3


def test_skaffold_waits_longer_than_a_start_may_take():
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    assert CONFIG["deploy"]["statusCheckDeadlineSeconds"] > values["startup"]["budgetSeconds"]
