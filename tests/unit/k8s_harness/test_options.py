"""Command-line options of the cluster tests; no cluster is needed."""

import subprocess
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = ["pytest", str(ROOT / "k8s-tests"), "-p", "no:cacheprovider", *words]
    return run_forked(command, patience(120))


def collected(*words: str) -> "subprocess.CompletedProcess[str]":
    return run("--collect-only", "-q", *words)


def test_cluster_tests_are_collected_without_a_cluster() -> None:
    done = collected()
    assert done.returncode == 0, done.stdout + done.stderr
    for file in (ROOT / "k8s-tests").glob("test_*.py"):
        assert f"{file.name}::" in done.stdout


def test_an_unknown_context_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """No test may report the reason again as a traceback of its own."""
    config = tmp_path / "kubeconfig"
    config.write_text("{apiVersion: v1, kind: Config, clusters: [], users: [], contexts: []}")
    cluster = ["--provider", "existing", "--context", "lab", "--kubeconfig", str(config)]
    done = run(*cluster, "--skip-build")
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert sum("no usable context 'lab'" in line for line in output.splitlines()) == 1
    assert "Traceback" not in output
    assert "Error" not in output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--provider", "existing"), "--provider existing needs --context NAME"),
        (("--context", "lab"), "--context: only allowed with --provider existing"),
    ],
)
def test_a_cluster_is_used_only_if_it_is_named(words: tuple[str, ...], why: str) -> None:
    done = collected(*words)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert why in done.stderr
