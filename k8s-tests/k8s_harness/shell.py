"""Runs other programs (kind, docker, helm, make). Unit tests replace `run` by a recorder."""

import subprocess
from typing import Protocol

__all__ = ["CommandFailed", "Run", "run"]


class CommandFailed(Exception):
    """A command failed or took too long. The message contains its output."""


class Run(Protocol):
    """Runs a command and returns its stdout. Raises CommandFailed."""

    def __call__(self, *words: str, timeout_s: float = 120) -> str: ...


def run(*words: str, timeout_s: float = 120) -> str:
    """Runs a program with subprocess."""
    line = " ".join(words)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s
        )
    except OSError as error:
        raise CommandFailed(f"{line}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{line}: did not end within {timeout_s:.0f} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise CommandFailed(f"{line}: exit code {done.returncode}\n{said[-8000:]}")
    return done.stdout
