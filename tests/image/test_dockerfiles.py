"""Both Dockerfiles agree with the chart, the Makefile and the documentation. Needs no engine."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import minisgl

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ["docker/Dockerfile", "docker/Dockerfile.cpu"]
VALUES = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    """Instructions with their arguments, with continued lines joined and without comments."""
    lines = (ROOT / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (s.partition(" ") for s in text.splitlines() if s)]


def last_stage(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word, rest in instructions(name):
        found = {} if word == "FROM" else found
        found.setdefault(word, []).append(rest)
    return found


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_image_is_an_argument_and_all_stages_use_it(name: str) -> None:
    steps = instructions(name)
    word, base = steps[0]
    assert (word, base.split("=")[0]) == ("ARG", "PYTHON_IMAGE")
    assert re.search(r":\d+\.\d+-slim-\w+$", base), "pinned by a tag that names its Debian"
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert bases == ["${PYTHON_IMAGE}"] * (2 if name.endswith(".cpu") else 3)


def test_kernels_are_compiled_in_a_stage_that_is_not_shipped() -> None:
    """The image contains neither compilers nor the layer nvcc of the build stage."""
    built = " ".join(rest for _, rest in instructions("docker/Dockerfile"))
    assert "minisgl compile" in built
    assert "--arch $CUDA_ARCHS" in built
    stage = last_stage("docker/Dockerfile")
    assert not any("apt-get" in rest or "compile" in rest for rest in stage["RUN"])
    assert not any("nvcc" in rest for rest in stage["COPY"])
    copied = [rest.split()[-2] for rest in stage["COPY"] if rest.startswith("--from=kernels")]
    settings = dict(re.findall(r"(\w+)=(\S+)", " ".join(stage["ENV"])))
    assert copied == ["/kernels/"]
    assert f"--kernel-cache /kernels{settings['MINISGL_KERNEL_CACHE']} " in built


def pins(name: str) -> dict[str, str]:
    """Version by package of a constraints file; names in pip's normal form."""
    lines = [line for line in (ROOT / name).read_text().split() if "==" in line]
    return {re.sub(r"[-_.]+", "-", p).lower(): v for p, v in (line.split("==") for line in lines)}


def test_the_cuda_image_has_the_versions_that_the_benchmarks_ran_with() -> None:
    """docs/benchmarks.md names the software of every GPU run; the image ships no other version."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    (row,) = re.findall(r"^\| software \| (.+) \|$", text, re.M)
    ran = dict(re.findall(r"([A-Za-z]+) (\d[\w.]*\w)", row))
    image = pins("constraints.txt") | pins("docker/constraints-gpu.txt")
    base = instructions("docker/Dockerfile")[0][1]
    shipped = {
        "Python": re.findall(r":(\d+\.\d+)-", base)[0],
        "CUDA": ".".join(image["cuda-toolkit"].split(".")[:2]),
        "torch": image["torch"],
        "Triton": image["triton"],
        "FlashInfer": image["flashinfer-python"],
        "uvicorn": image["uvicorn"],
    }
    assert shipped == ran


def test_a_pin_of_the_cuda_image_replaces_the_common_one(tmp_path: Path) -> None:
    """The awk command of the Dockerfile gives each package one version."""
    (script,) = (rest for _, rest in instructions("docker/Dockerfile") if rest.startswith("awk"))
    for name in ("constraints.txt", "docker/constraints-gpu.txt"):
        (tmp_path / Path(name).name).write_text((ROOT / name).read_text())
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)
    lines = [line for line in (tmp_path / "pins.txt").read_text().split() if "==" in line]
    merged = pins("constraints.txt") | pins("docker/constraints-gpu.txt")
    assert pins(str(tmp_path / "pins.txt")) == merged
    assert len(lines) == len(merged)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_contains_no_settings_of_pip(name: str) -> None:
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"} <= {
        rest for word, rest in instructions(name) if word == "ARG"
    }
    assert not any("PIP" in rest for rests in last_stage(name).values() for rest in rests)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_user_and_entry_point_agree_with_the_chart(name: str) -> None:
    stage = last_stage(name)
    user = VALUES["podSecurityContext"]
    assert stage["USER"] == [f"{user['runAsUser']}:{user['runAsGroup']}"]
    assert json.loads(stage["ENTRYPOINT"][0]) == ["minisgl"]
    assert json.loads(stage["CMD"][0]) == ["--host", "0.0.0.0"]
    healthcheck = stage["HEALTHCHECK"][0].split(" CMD ")[1]
    assert json.loads(healthcheck)[:2] == ["python3", "-c"]
    assert "/livez" in healthcheck
    assert stage["EXPOSE"] == ["1919"]
    assert "MINISGL_COMMIT=$REVISION" in stage["ENV"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_cache_folders_agree_with_the_chart(name: str) -> None:
    template = (ROOT / "helm" / "templates" / "_env.tpl").read_text()
    folders = re.search(r"dict ((?:\"\w+\" \"[/\w]*\" ?)+)\}\}", template)
    assert folders
    words = re.findall(r'"([^"]*)"', folders[1])
    chart = {name: f"/cache{folder}" for name, folder in zip(words[::2], words[1::2], strict=True)}
    settings = re.findall(r"(\w+)=(\S+)", " ".join(last_stage(name)["ENV"]))
    image = {variable: value for variable, value in settings if value.startswith("/cache")}
    assert image.items() <= chart.items()
    assert name.endswith(".cpu") or image == chart


def test_only_needed_files_are_sent_to_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    sent = {line[1:] for line in lines if line.startswith("!")}
    copies = [
        rest.split() for name in DOCKERFILES for word, rest in instructions(name) if word == "COPY"
    ]
    assert {s for words in copies for s in words[:-1] if not words[0].startswith("--")} == sent
    assert all((ROOT / source).exists() for source in sent)


@pytest.mark.parametrize(("target", "suffix"), [("image", ""), ("image-cpu", "-cpu")])
def test_make_gives_the_images_the_names_of_the_chart(target: str, suffix: str) -> None:
    shown = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"-t {VALUES['image']['repository']}:{minisgl.__version__}{suffix} ." in shown


def test_an_image_can_be_built_for_several_platforms() -> None:
    platforms = "linux/amd64,linux/arm64"
    command = ["make", "-n", "image", f"PLATFORMS={platforms}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f" --platform {platforms} " in shown
    texts = [(ROOT / name).read_text() for name in [*DOCKERFILES, "docker/constraints-gpu.txt"]]
    assert not any(re.search(r"x86|amd64|aarch64|arm64", text) for text in texts)
