"""Agents finish a tool round: Codex CLI, Claude Code, opencode, qwen-code, SDKs and frameworks.

The newest versions come from the registries of npm and Python. The answer to the request of the
user calls the shell tool of the agent. The agent must run the command, and must print the answer to
the result of the tool.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minisgl.scripted import DONE, write_model
from tests.patience import patience
from tests.process.agents import ANSWER, CALL, run_scripted
from tests.process.harness import ServerProcess, run_server
from tests.proof.venvs import make_venv

pytestmark = pytest.mark.proof

MODEL = "served"
KEY = "secret"
LIMIT_S = 600
TASK = "Write the word sesame to the file made.txt."
COMMAND = "echo sesame > made.txt"
SCRIPTS = Path(__file__).parent / "scripts"
# As in docs/api.md.
OPENCODE_CONFIG = """
{
  "provider": {
    "minisgl": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "@address/v1", "apiKey": "none"},
      "models": {"@model": {"limit": {"context": 131072, "output": 8192}}}
    }
  },
  "permission": {"bash": "allow"}
}
"""
CODEX_CONFIG = """
model = "{model}"
model_provider = "minisgl"

[model_providers.minisgl]
name = "minisgl"
base_url = "{url}/v1"
env_key = "MINISGL_API_KEY"
wire_api = "responses"
"""


def rules(tool: str, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    call = json.dumps({"name": tool, "arguments": arguments})
    text = f"I write it.\n<tool_call>\n{call}\n</tool_call>"
    return [("<|im_start|>tool", ANSWER), (TASK, text), ("", "A task.")]


def install(folder: Path, package: str, command: str) -> Path:
    """The command of a package of npm. Skips the test when no registry can be reached."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    done = subprocess.run(npm, capture_output=True, text=True, timeout=patience(LIMIT_S))
    unreachable = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN")
    if done.returncode and any(words in done.stderr for words in unreachable):
        pytest.skip(f"no registry offers {package} here")
    assert done.returncode == 0, done.stderr[-3000:]
    script = folder / "node_modules" / package / "install.cjs"
    if script.is_file():  # npm may be configured to run no scripts of packages
        subprocess.run(
            ["node", script.name], cwd=script.parent, check=True, timeout=patience(LIMIT_S)
        )
    return folder / "node_modules" / ".bin" / command


class Expected(NamedTuple):
    """The file that the call of the agent makes, its content, and the answer to its result."""

    file: str = "made.txt"
    content: str = "sesame\n"
    answer: str = ANSWER


MADE = Expected()


def run_agent(
    server: ServerProcess,
    folder: Path,
    command: list[str],
    expected: Expected = MADE,
    **environment: str,
) -> str:
    """Run an agent in a new folder with the task. Returns its output; it has made the file."""
    home, work = folder / "home", folder / "work"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(LIMIT_S),
        cwd=work,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
    )
    report = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{server.stderr[-3000:]}"
    assert done.returncode == 0, report
    assert (work / expected.file).read_text() == expected.content, report
    assert expected.answer in done.stdout, report
    return done.stdout


def test_codex_finishes_a_tool_round(tmp_path: Path) -> None:
    codex = install(tmp_path / "npm", "@openai/codex", "codex")
    version = subprocess.run([str(codex), "--version"], capture_output=True, text=True).stdout
    script = rules("exec_command", {"cmd": COMMAND})
    flags = ("--api-key", KEY, "--served-model-name", MODEL)
    with run_scripted(tmp_path, script, *flags) as server:
        (tmp_path / "home").mkdir()
        config = CODEX_CONFIG.format(model=MODEL, url=server.url)
        (tmp_path / "home" / "config.toml").write_text(config)
        command = [str(codex), "exec", "--skip-git-repo-check", TASK]
        command.insert(2, "--dangerously-bypass-approvals-and-sandbox")
        home = str(tmp_path / "home")
        run_agent(server, tmp_path, command, CODEX_HOME=home, MINISGL_API_KEY=KEY)
        assert server.metrics()["ignored_features_total{feature=tool}"] > 0
    sys.stdout.write(version)


def test_claude_code_finishes_a_tool_round(tmp_path: Path) -> None:
    claude = install(tmp_path / "npm", "@anthropic-ai/claude-code", "claude")
    version = subprocess.run([str(claude), "--version"], capture_output=True, text=True).stdout
    script = rules("Bash", {"command": COMMAND, "description": "write the file"})
    flags = ("--api-key", KEY, "--served-model-name", MODEL)
    with run_scripted(tmp_path, script, *flags) as server:
        command = [str(claude), "-p", TASK, "--model", MODEL, "--allowedTools", "Bash"]
        run_agent(
            server,
            tmp_path,
            command,
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_API_KEY=KEY,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    sys.stdout.write(version)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with the model of `minisgl scripted`, on which new users try their agents."""
    write_model(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--served-model-name", MODEL, "--device", "cpu")
    with run_server(*flags) as server:
        yield server.wait_ready()


SCRIPTED = Expected("minisgl.txt", "hello\n", DONE)


def test_opencode_finishes_a_tool_round_with_scripted_weights(
    scripted: ServerProcess, tmp_path: Path
) -> None:
    opencode = install(tmp_path / "npm", "opencode-ai", "opencode")
    (tmp_path / "work").mkdir()
    config = OPENCODE_CONFIG.replace("@address", scripted.url).replace("@model", MODEL)
    (tmp_path / "work" / "opencode.json").write_text(config)
    command = [str(opencode), "run", "-m", f"minisgl/{MODEL}", TASK]
    run_agent(scripted, tmp_path, command, SCRIPTED)


def test_qwen_code_finishes_a_tool_round_with_scripted_weights(
    scripted: ServerProcess, tmp_path: Path
) -> None:
    qwen = install(tmp_path / "npm", "@qwen-code/qwen-code", "qwen")
    run_agent(
        scripted,
        tmp_path,
        [str(qwen), "--yolo", "-p", TASK],
        SCRIPTED,
        OPENAI_BASE_URL=f"{scripted.url}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL=MODEL,
    )


@pytest.mark.parametrize(
    ("script", "packages"),
    [("tool_runner.mjs", ["@anthropic-ai/sdk"]), ("vercel.mjs", ["ai", "@ai-sdk/openai", "zod"])],
)
def test_clients_in_typescript_finish_a_tool_round(
    tmp_path: Path, script: str, packages: list[str]
) -> None:
    for package in packages:
        install(tmp_path / "npm", package, "")
    shutil.copy(SCRIPTS / script, tmp_path / "npm")
    run_client(tmp_path, ["node", str(tmp_path / "npm" / script)])


def test_the_tool_runner_of_anthropic_finishes_a_tool_round(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", "anthropic") / "python"
    run_client(tmp_path, [str(python), str(SCRIPTS / "tool_runner.py")])


def test_frameworks_finish_a_tool_round(tmp_path: Path) -> None:
    packages = ("openai-agents", "pydantic-ai-slim[openai,anthropic]", "litellm")
    python = make_venv(tmp_path / "venv", *packages) / "python"
    run_client(tmp_path, [str(python), str(SCRIPTS / "agents_client.py")])


def run_client(folder: Path, command: list[str]) -> None:
    """Run a script of a client, which asks a question and calls the tool `add`."""
    question = "What is 2 + 3?"
    script = [("<|im_start|>tool", ANSWER), (question, CALL), ("", "Hello there.")]
    with run_scripted(folder, script, "--served-model-name", MODEL) as server:
        command = [*command, server.url, MODEL, question, ANSWER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(LIMIT_S))
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{server.stderr[-3000:]}"
    sys.stdout.write(done.stdout)
