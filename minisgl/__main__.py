"""`minisgl` and `python -m minisgl`: serve, or dispatch to a subcommand."""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.core import ConfigError
from minisgl.utils import CONFIG_EXIT, setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Errors of the user are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:
            return _bench(arguments[1:])
        if arguments[:1] == ["compile"]:
            raise ConfigError(
                "minisgl compile is not there yet: GPU kernels compile at the first start, "
                "into the cache folders of FlashInfer and Triton"
            )
        return _serve(arguments)
    except ConfigError as error:
        sys.stderr.write(f"minisgl: error: {error}\n")
        return CONFIG_EXIT
    except KeyboardInterrupt:
        return 130


def _serve(arguments: Sequence[str]) -> int:
    from minisgl.server.args import resolve
    from minisgl.server.launch import launch

    setup_logging("launcher", "info")
    # PID 1 has no default actions, and a download may take minutes. Nothing has been started yet.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    return launch(resolve(arguments, os.environ, _resolve_model, _demo_path))


def _resolve_model(name: str, revision: str | None) -> str:
    from minisgl.core.hub import resolve_model

    return resolve_model(name, revision)


def _demo_path() -> Path:
    if importlib.util.find_spec("minisgl.demo") is None:
        raise ConfigError("the demo model is not installed; give --model")
    from minisgl.demo import model_path

    return model_path()


def _bench(arguments: list[str]) -> int:
    if importlib.util.find_spec("minisgl.benchmark") is None:
        raise ConfigError("minisgl bench is not part of this installation")
    from minisgl.benchmark import main as bench

    return bench(arguments)


if __name__ == "__main__":
    sys.exit(main())
