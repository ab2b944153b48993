"""Third-party clients against the demo server; docs/api.md has the results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.demo import model_path
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server
from tests.proof.venvs import make_venv

pytestmark = pytest.mark.proof

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = "minisgl-demo"
LIMIT_S = 900


@pytest.mark.parametrize(
    ("script", "requirements"),
    [
        ("openai_client.py", ["openai==1.109.1"]),
        ("openai_client.py", ["openai==2.54.0"]),
        ("openai_client.py", ["openai"]),
        ("langchain_client.py", ["langchain-openai"]),
        ("litellm_client.py", ["litellm"]),
        ("instructor_client.py", ["instructor"]),
        ("pydantic_ai_client.py", ["pydantic-ai-slim[openai]"]),
        ("openai_agents_client.py", ["openai-agents"]),
    ],
    ids=[
        "openai-1",
        "openai-2",
        "openai-newest",
        "langchain",
        "litellm",
        "instructor",
        "pydantic-ai",
        "openai-agents",
    ],
)
def test_client(
    demo_server: ServerProcess, tmp_path: Path, script: str, requirements: list[str]
) -> None:
    python = make_venv(tmp_path / "venv", *requirements) / "python"
    command = [str(python), str(SCRIPTS / script), demo_server.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(LIMIT_S))
    assert done.returncode == 0, done.stderr[-3000:]
    sys.stdout.write(done.stdout)  # the version, for docs/api.md: pytest -rP


def test_aiperf_completes_a_run(demo_server: ServerProcess, tmp_path: Path) -> None:
    """NVIDIA's load generator (1.2 GB) parses the stream and /metrics by itself."""
    tool = make_venv(tmp_path / "venv", "aiperf") / "aiperf"
    shutil.copytree(model_path(), tmp_path / "tokenizer")  # it takes a relative folder only
    command = [str(tool), "profile", "--model", MODEL, "--url", demo_server.url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", "./tokenizer"]
    command += ["--concurrency", "4", "--request-count", "40", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", "artifacts"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(LIMIT_S), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["is_complete"]
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == 40
    assert found["usage_completion_tokens"]["avg"] == 8
    assert found["time_to_first_token"]["count"] == 40
    sys.stdout.write(f"aiperf {found['aiperf_version']}\n")


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Cases that break the schema are refused, answers match it, and no status is a 5xx."""
    tool = make_venv(tmp_path / "venv", "schemathesis") / "schemathesis"
    small = ("--max-seq-len-override", "160", "--max-choices", "4")
    with run_server("--num-pages", "1024", "--admin-api-key", "root", *small) as server:
        server.wait_ready()
        command = [str(tool), "run", server.url + "/openapi.json", "--continue-on-failure"]
        command += ["--header", "Authorization: Bearer root", "--max-examples", "30"]
        # A schema cannot express a prompt's limit in tokens, nor the refusals of a chat template.
        command += ["--exclude-checks", "positive_data_acceptance", "--max-time", "180"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience(LIMIT_S), cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert server.status("/livez") == 200
