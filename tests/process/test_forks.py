"""A fork of tests/forks.py ends, fails and takes signals as `python -m` does."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.forks import ForkedProcess, run_forked
from tests.patience import patience

pytestmark = pytest.mark.process

# The Python library has these modules.
SHOW = "import os; print(os.environ['FORKED'])"
ENDS = [
    (["timeit", "-n", "1", "-r", "1", SHOW], {"FORKED": "yes, this one"}, "yes, this one\n", 0),
    (["json.tool", "--sort-keys", "/absent"], {}, "No such file", 2),
    (["absent_module"], {}, "No module named absent_module", 1),
]


@pytest.mark.parametrize(("words", "environ", "text", "code"), ENDS)
def test_output_environment_and_exit_code_are_those_of_the_module(
    tmp_path: Path, words: list[str], environ: dict[str, str], text: str, code: int
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    process = ForkedProcess(words, out, err, {**os.environ, **environ}, None)
    assert process.wait(patience()) == code
    assert text in out.read_text() + err.read_text()


def test_a_module_that_a_fork_starts_runs_in_the_given_folder(tmp_path: Path) -> None:
    """Regression: it ran in the folder of the fork."""
    words = ["-m", "timeit", "-n", "1", "-r", "1", "import os; print(os.getcwd())"]
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, *{words}], cwd={str(tmp_path)!r})"
    )
    assert run_forked(["-c", code], patience()).stdout.splitlines()[0] == str(tmp_path)


def test_a_signal_ends_a_fork(tmp_path: Path) -> None:
    words = ["http.server", "0", "--bind", "127.0.0.1"]
    process = ForkedProcess(words, tmp_path / "out", tmp_path / "err", os.environ, None)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(patience()) == -signal.SIGTERM
    process.kill()  # does nothing
