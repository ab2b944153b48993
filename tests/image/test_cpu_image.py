"""Runs the CPU image with the chart's restrictions: answers, drain, files, size.

The tests need a Docker engine. `make proof ARGS=tests/image` builds the image first.
"""

import json
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
import yaml

from tests.chart.helm import CHART, find_helm, parse, pick
from tests.image.engine import Container, docker, inspect, running
from tests.patience import patience
from tests.process.harness import wait_for

pytestmark = pytest.mark.proof

MB = 1_000_000
MAX_ADDED_MB = 1_050  # size that the Dockerfile adds to its base image
MAX_PACKAGE_MB = 20  # size that nodes pull for a new version of minisgl alone
MEMORY = "3g"
READ_ONLY = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/cache", "--memory", MEMORY)
HEALTH = ("--health-interval", "1s")
QUESTION, ANSWER = "What is 12 + 30?", "42"
CHART_DRAIN = yaml.safe_load((CHART / "values.yaml").read_text())["drain"]
COMPILERS = (
    "cc",
    "gcc",
    "g++",
    "c++",
    "clang",
    "tcc",
    "as",
    "ld",
    "make",
    "cmake",
    "ninja",
    "nvcc",
)


@pytest.fixture(scope="module")
def locked(image: str) -> Iterator[Container]:
    """A container with read-only root, no capabilities, limited memory, and the default command."""
    with running(image, options=(*READ_ONLY, *HEALTH)) as container:
        print(f"ready {container.ready_s:.1f} s after docker run")
        yield container


def test_answers_over_http(locked: Container) -> None:
    assert locked.ask(QUESTION) == ANSWER
    assert inspect(locked.id)["HostConfig"]["ReadonlyRootfs"]


def test_the_user_is_numeric_and_has_a_name(locked: Container, image: str) -> None:
    assert inspect(image)["Config"]["User"] == "10001:10001"
    code = "import os, pwd; print(os.getuid(), os.getgid(), pwd.getpwuid(os.getuid()).pw_name)"
    assert locked.execute(code) == "10001 10001 minisgl"
    users = docker("top", locked.id, "-eo", "uid,pid").splitlines()[1:]
    assert {line.split()[0] for line in users} == {"10001"}


def test_the_server_has_no_capabilities(locked: Container) -> None:
    status = locked.execute("print(open('/proc/1/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"


def test_only_tmp_and_cache_are_writable(locked: Container) -> None:
    code = (
        "import os\n"
        "for root, folders, files in os.walk('/'):\n"
        "    folders[:] = [f for f in folders if os.path.join(root, f) not in ('/proc', '/sys')]\n"
        "    if os.access(root, os.W_OK): print(root); folders.clear()\n"
    )
    writable = {f for f in locked.execute(code).splitlines() if not f.startswith("/dev")}
    assert writable == {"/tmp", "/cache"}


def test_memory_stays_under_its_limit(locked: Container) -> None:
    assert locked.ask(QUESTION) == ANSWER
    used = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", locked.id).strip()
    print(f"memory: {used}")
    assert used.endswith("3GiB")
    assert not locked.state["OOMKilled"]


def test_healthcheck_turns_healthy(locked: Container) -> None:
    wait_for(lambda: locked.state["Health"]["Status"] == "healthy", "a healthy container")


def test_sigterm_to_pid_1_drains_and_exits_0(image: str) -> None:
    """The running stream completes, a late request is served, and the container exits in time."""
    flags = ("--host", "0.0.0.0", "--drain-grace", "15")
    grace_s = 15 + CHART_DRAIN["timeoutSeconds"] + CHART_DRAIN["teardownSeconds"]
    with running(image, *flags, options=READ_ONLY) as container:
        messages = [{"role": "user", "content": "Spell the word planet."}]
        body = {"model": "minisgl-demo", "messages": messages, "stream": True}
        url = f"{container.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=patience()) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            sent_s = time.monotonic()
            docker("kill", "--signal", "TERM", container.id)
            rest = list(lines)
        assert first.startswith("data: ")
        assert [line for line in rest if line][-1] == "data: [DONE]"
        wait_for(lambda: container.status("/readyz") == 503, "unreadiness")
        assert container.ask(QUESTION) == ANSWER
        assert container.wait_exit(grace_s) == 0
        print(f"exit {time.monotonic() - sent_s:.1f} s after SIGTERM")
        assert not container.state["OOMKilled"]
        assert "Traceback" not in container.logs


def test_the_server_writes_nothing_to_a_writable_root(image: str) -> None:
    """On a read-only root a failed write may stay unnoticed; here docker diff shows each write."""
    with running(image, options=("--memory", MEMORY)) as container:
        assert container.ask(QUESTION) == ANSWER
        changed = [line.split(maxsplit=1)[1] for line in docker("diff", container.id).splitlines()]
        elsewhere = [p for p in changed if p.split("/")[1] not in ("tmp", "cache")]
        assert elsewhere == []


def test_runs_with_the_settings_of_the_chart(image: str) -> None:
    """Uses flags, environment, user, mounts and memory of the rendered pod."""
    helm = find_helm()
    if helm is None:
        pytest.skip("no helm on PATH and no helm-python-sdk: pip install '.[chart]'")
    values = yaml.safe_load((CHART / "ci" / "cpu-demo-values.yaml").read_text())
    objects = parse(helm.template(values, name="minisgl", namespace="llm", chart=CHART))
    pod = pick(objects, "Deployment")["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert "command" not in server
    user = pod["securityContext"]
    options = ["--read-only", "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
    options += ["--memory", server["resources"]["limits"]["memory"].removesuffix("i")]
    for mount in server["volumeMounts"]:
        options += ["--tmpfs", mount["mountPath"]]
    for variable in server["env"]:
        options += ["--env", f"{variable['name']}={variable['value']}"]
    with running(image, *server["args"], options=tuple(options)) as container:
        assert container.ask(QUESTION) == ANSWER


def test_entry_point_needs_no_shell_and_labels_are_set(image: str) -> None:
    config = inspect(image)["Config"]
    assert config["Entrypoint"] == ["minisgl"]
    assert config["Cmd"] == ["--host", "0.0.0.0"]
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python3"]
    assert config["Volumes"] is None
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in config["Labels"].items()}
    flags = ("run", "--rm", "--network", "none", "--read-only", image, "--version")
    assert docker(*flags).split()[-1] == labels["version"]
    assert labels["licenses"] == "Apache-2.0"
    assert {"title", "description", "source", "revision"} <= set(labels)


def test_holds_no_compiler_and_no_secret_of_the_build(image: str) -> None:
    code = (
        "import json, os, shutil\n"
        f"found = [n for n in {COMPILERS!r} if shutil.which(n)]\n"
        "left = [p for p in ('/etc/pip.conf', '/run/secrets', '/build') if os.path.exists(p)]\n"
        "print(json.dumps(found + left))"
    )
    flags = ("run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c", code)
    assert json.loads(docker(*flags)) == []
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "PIP_" not in history


def test_size_of_the_layers(image: str) -> None:
    shown = docker("history", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image)
    layers = [line.split("\t", 1) for line in shown.splitlines()]
    last = next(n for n, (_, by) in enumerate(layers) if "groupadd" in by)
    sizes = [(int(size), by) for size, by in layers[: last + 1] if size != "0"]
    for size, by in sizes:
        print(f"{size / MB:8.1f} MB  {by}")
    assert sum(size for size, _ in sizes) < MAX_ADDED_MB * MB
    assert sizes[0][0] < MAX_PACKAGE_MB * MB


def test_a_failed_start_ends_with_one_sentence(image: str) -> None:
    """Kubernetes shows the end of the output as the termination message."""
    words = ["docker", "run", "--rm", "--read-only", "--network", "none", image, "--no-such-flag"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience())
    assert done.returncode not in (0, 126, 127)
    assert "--no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr
