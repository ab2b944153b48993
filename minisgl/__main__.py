"""`minisgl` and `python -m minisgl`: serve a model, or run a subcommand."""

import argparse
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from minisgl.core import ConfigError
from minisgl.utils import near_names, setup_logging, supervise
from minisgl.utils.bytecode import keep_bytecode

# Commands with a module of their own below minisgl, which has the function `main`.
_MODULES = {
    "plan": "planning.command",
    "doctor": "doctor",
    "check": "parity",
    "bench": "benchmark.cli",
    "scripted": "scripted",
}
COMMANDS = ("serve", "chat", "run", "compile", *_MODULES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. A ConfigError prints one line to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        logging.shutdown()  # The error is the last line.
        sys.stderr.write(f"minisgl: error: {error}\n")
        return supervise.CONFIG_EXIT
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    """Run the command that the first word names, or the server if the first word is no command.

    Raises ConfigError for a misspelt command.
    """
    word = arguments[0] if arguments else ""
    match word:
        case "serve":
            return _serve(arguments[1:])
        case "chat" | "run":  # Ollama calls it run
            return _serve([*arguments[1:], "--shell"])
        case "compile":
            return _compile(arguments[1:])
        case _ if word in _MODULES:
            code: int = importlib.import_module(f"minisgl.{_MODULES[word]}").main(arguments[1:])
            return code
    # A hub id without an owner is rare, and it resembles no command.
    is_model = "/" in word or Path(word).is_dir()
    if not is_model and (near := near_names(word, COMMANDS)):
        raise ConfigError(f"there is no command {word!r}{near}")
    return _serve(arguments)


def _serve(arguments: Sequence[str]) -> int:
    setup_logging("launcher", "info")
    keep_bytecode()
    from minisgl.launch.launcher import join_running_server, launch
    from minisgl.settings.resolve import KEY_VARIABLES, resolve

    # In a container this process is PID 1, for which the kernel has no default action for signals.
    # Without a handler, SIGTERM would not end a download, which may take minutes.
    signal.signal(signal.SIGTERM, _end_download)
    environ = dict(os.environ)
    for name in KEY_VARIABLES:  # Child processes, such as git and the workers, inherit os.environ.
        os.environ.pop(name, None)
    began_s = time.monotonic()
    join = partial(join_running_server, environ=environ)
    config = resolve(arguments, environ, before_download=join)
    return launch(config, download_s=time.monotonic() - began_s)


def _end_download(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once on SIGTERM. sys.exit would wait for the threads of the download."""
    sys.stderr.write(
        "minisgl: error: SIGTERM ended the start while the model was looked up or downloaded; if "
        "Kubernetes sent it, raise startup.budgetSeconds of the chart or set cache.enabled\n"
    )
    sys.stderr.flush()
    os._exit(128 + number)


def _compile(arguments: Sequence[str]) -> int:
    from minisgl.settings.command_line import ArgumentParser
    from minisgl.settings.resolve import resolve

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
    command = (parser.prog, "--arch")
    config = resolve(flags, os.environ, weights=False, command=command)
    from minisgl.compile.kernels import compile_kernels
    from minisgl.drafts import with_speculation
    from minisgl.models.config import draft_method
    from minisgl.quantization import with_quantizations

    budget = config.scheduler.prefill_budget_tokens
    extensions = with_speculation(draft_method(config.engine), with_quantizations())
    compile_kernels(config.engine, budget, options.arch, extensions)
    return 0


def _arch(text: str) -> int:
    """Parse a compute capability: 90 for 9.0."""
    major, _, minor = text.partition(".")
    if not (major.isdigit() and len(minor) == 1 and minor.isdigit()):
        raise argparse.ArgumentTypeError("must be a compute capability such as 9.0")
    return 10 * int(major) + int(minor)


if __name__ == "__main__":
    sys.exit(main())
