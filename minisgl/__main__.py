"""`minisgl` and `python -m minisgl`: serve a model, or run a subcommand."""

import argparse
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from minisgl.core import ConfigError
from minisgl.core.hub import resolve_model
from minisgl.utils import near_names, setup_logging, supervise
from minisgl.utils.bytecode import keep_bytecode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. A ConfigError prints one line to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(*arguments[:1])(arguments)
    except ConfigError as error:
        logging.shutdown()  # The error is the last line.
        sys.stderr.write(f"minisgl: error: {error}\n")
        return supervise.CONFIG_EXIT
    except KeyboardInterrupt:
        return 130


def _command(word: str = "") -> Callable[[list[str]], int]:
    """Return the function that runs a command line whose first word is `word`.

    Without a command, the server runs. Raises ConfigError for a misspelt command.
    """
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": lambda words: _serve(words[1:]),
        "chat": lambda words: _serve([*words[1:], "--shell"]),
        "run": lambda words: _serve([*words[1:], "--shell"]),  # as Ollama calls it
        "plan": lambda words: _plan(words[1:]),
        "doctor": lambda words: _doctor(words[1:]),
        "compile": lambda words: _compile(words[1:]),
        "bench": lambda words: _bench(words[1:]),
    }
    # A hub id without an owner is rare, and it resembles no command.
    is_model = "/" in word or Path(word).is_dir()
    if word not in commands and not is_model and (near := near_names(word, commands)):
        raise ConfigError(f"there is no command {word!r}{near}")
    return commands.get(word, _serve)


def _serve(arguments: Sequence[str]) -> int:
    setup_logging("launcher", "info")
    keep_bytecode()
    from minisgl.server.cli import KEY_VARIABLES, resolve
    from minisgl.server.launch import launch

    # In a container this process is PID 1, for which the kernel has no default action for signals.
    # Without a handler, SIGTERM would not end a download, which may take minutes.
    signal.signal(signal.SIGTERM, _end_download)
    environ = dict(os.environ)
    for name in KEY_VARIABLES:  # Child processes, such as git and the workers, inherit os.environ.
        os.environ.pop(name, None)
    began_s = time.monotonic()
    config = resolve(arguments, environ, resolve_model, _demo_path)
    return launch(config, download_s=time.monotonic() - began_s, environ=environ)


def _end_download(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once on SIGTERM. sys.exit would wait for the threads of the download."""
    sys.stderr.write(
        "minisgl: error: SIGTERM ended the start while the model was looked up or downloaded; if "
        "Kubernetes sent it, raise startup.budgetSeconds of the chart or set cache.enabled\n"
    )
    sys.stderr.flush()
    os._exit(128 + number)


def _compile(arguments: Sequence[str]) -> int:
    from minisgl.server.cli import ArgumentParser, resolve

    parser = ArgumentParser(
        prog="minisgl compile",
        description="Compile the GPU kernels of a model into the folder --kernel-cache. "
        "Needs nvcc, g++ and ninja, but no GPU and no weights.",
        epilog="Takes all flags of minisgl. Give the flags of the server that will use the folder.",
        allow_abbrev=False,
    )
    help_text = "Compute capabilities, such as 9.0. Default: those of the local GPUs."
    parser.add_argument("--arch", nargs="+", default=[], type=_arch, metavar="X.Y", help=help_text)
    options, flags = parser.parse_known_args(arguments)
    setup_logging("compile", "info")
    config = resolve(flags, os.environ, resolve_model, _demo_path, weights=False)
    from minisgl.compile.kernels import compile_kernels
    from minisgl.quantization import with_quantizations
    from minisgl.speculative import with_speculation

    budget = config.scheduler.prefill_budget_tokens
    extensions = with_speculation(config.engine.speculative, with_quantizations())
    compile_kernels(config.engine, budget, options.arch, extensions)
    return 0


def _plan(arguments: Sequence[str]) -> int:
    from minisgl.planning import main as plan

    setup_logging("plan", "warning")
    return plan(arguments, os.environ, _demo_path)


def _doctor(arguments: Sequence[str]) -> int:
    from minisgl.doctor import main as doctor

    return doctor(arguments)


def _arch(text: str) -> int:
    """Parse a compute capability: 90 for 9.0."""
    major, _, minor = text.partition(".")
    if not (major.isdigit() and len(minor) == 1 and minor.isdigit()):
        raise argparse.ArgumentTypeError("must be a compute capability such as 9.0")
    return 10 * int(major) + int(minor)


def _demo_path() -> Path:
    if importlib.util.find_spec("minisgl.demo") is None:
        raise ConfigError("no --model is given, and the demo model is not installed; give --model")
    from minisgl.demo import model_path

    return model_path()


def _bench(arguments: list[str]) -> int:
    if importlib.util.find_spec("minisgl.benchmark") is None:
        raise ConfigError("minisgl bench is not part of this installation")
    from minisgl.benchmark import main as bench

    return bench(arguments)


if __name__ == "__main__":
    sys.exit(main())
