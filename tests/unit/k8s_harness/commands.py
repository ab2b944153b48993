"""A substitute for `run` that records commands and returns prepared output."""

from collections.abc import Callable

from k8s_harness.shell import CommandFailed


class Recorder:
    """Records each command line and returns the output prepared for it, or "".

    answers: output by the beginning of the command line; an exception is raised.
    on_run: called with each command line, to make the files that a command would make.
    """

    def __init__(self, answers: dict[str, str | Exception] | None = None) -> None:
        self.lines: list[str] = []
        self._answers = answers or {}
        self.on_run: Callable[[str], None] = lambda line: None

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        line = " ".join(words)
        self.lines.append(line)
        self.on_run(line)
        for start, answer in self._answers.items():
            if line.startswith(start):
                if isinstance(answer, Exception):
                    raise answer
                return answer
        return ""


FAILED = CommandFailed("it failed")
