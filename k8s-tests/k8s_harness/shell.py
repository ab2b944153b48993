"""Commands of other programs (kind, docker, helm, make): one door, through which tests can look."""

import subprocess
from typing import Protocol

__all__ = ["CommandFailed", "Run", "run"]


class CommandFailed(Exception):
    """A command ended with another code than 0, or not in time; holds all that it wrote."""


class Run(Protocol):
    """Runs a command and returns its stdout. Raises CommandFailed."""

    def __call__(self, *words: str, timeout_s: float = 120) -> str: ...


def run(*words: str, timeout_s: float = 120) -> str:
    """The real one."""
    line = " ".join(words)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s
        )
    except OSError as error:
        raise CommandFailed(f"{line}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{line}: not done after {timeout_s:.0f} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise CommandFailed(f"{line}: exit code {done.returncode}\n{said[-8000:]}")
    return done.stdout
