"""The parser of the command line: all flags of flags.toml, their bounds, help and errors."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

import minisgl
from minisgl.settings.config import ServerConfig
from minisgl.settings.places import is_switch, read_flags, refused_flags
from minisgl.utils import near_names

# The structs inside ServerConfig, by the section of `to` in flags.toml. All other fields of
# ServerConfig belong to the section "server".
_SECTIONS = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}
# The largest value of a flag without `high`, by type. Each float flag without `high` is a time. The
# limit of those in seconds is 1e6 s (12 days), because --read-timeout goes to Linux as milliseconds
# in 31 bits. Those in milliseconds have the same number.
_HIGHEST: Mapping[type, float] = {int: math.inf, float: 1e6}

_EXAMPLES = """examples:
  minisgl                                   serve the demo model without a GPU
  minisgl serve Qwen/Qwen3-8B --port 8000   serve a model of the hub or a folder
  minisgl chat Qwen/Qwen3-0.6B              serve a model, and chat with it here

minisgl serves language models over the OpenAI API. Its commands:
  minisgl [serve] [MODEL] [FLAGS]   serve a model; without MODEL, the demo model
  minisgl chat [MODEL] [FLAGS]      the same as serve --shell
  minisgl plan [MODEL] [FLAGS]      compute the capacity of a GPU; needs no GPU
  minisgl doctor                    check GPU, compilers, memory and hub
  minisgl check [MODEL] [FLAGS]     compare answers with those of transformers
  minisgl compile [MODEL] [FLAGS]   compile GPU kernels ahead of time
  minisgl bench NAME [FLAGS]        run a benchmark; bench --help lists them
"""
_PLACES = """places of a setting:
  The command line wins over the environment, and the environment over the file
  of --config. The variable of a flag is MINISGL_ and a name of the flag:
  MINISGL_MAX_RUNNING_REQUESTS=64. The variable of --port is MINISGL_HTTP_PORT,
  because Kubernetes sets MINISGL_PORT. The file is TOML, and its keys are names
  of flags: max-running-requests = 64. --no-NAME switches off a flag that takes
  no value, for example --no-dummy-weight.

names of other servers:
  Flags of vLLM and SGLang with the same meaning work too: --max-model-len.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Writes the value of a flag once, after all names of the flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest)
        return ", ".join(action.option_strings) + value


class ArgumentParser(argparse.ArgumentParser):
    """Reports an error in one line with the names of similar flags. Accepts full names only.

    place: the variable or the key of a file that is parsed now; "" for the command line.
    further_flags: flags that the caller has parsed already, for suggestions.
    """

    place = ""
    further_flags: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        place = f"{self.place}: " if self.place else ""
        sys.stderr.write(f"{self.prog}: error: {place}{message}; see --help\n")
        sys.exit(2)

    def parse_strictly(
        self, argv: Sequence[str], settings: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, or exit with 2 and a line that names the unknown flag and similar ones.

        One argument may stand without a flag: the model. settings: values of other places, which
        the arguments replace.
        """
        options, rest = self.parse_known_args(argv, settings)
        # The model is in `rest` too. It is no positional of the parser, because argparse leaves an
        # optional positional empty after a flag.
        models = [word for word in rest if not word.startswith("-")]
        flags = [word for word in rest if word.startswith("-")]
        if flags:
            flag = flags[0].split("=")[0]
            self.error(f"unknown argument {flag}{self._hint(flag)}")
        if len(models) > 1:
            self.error(f"give one model, not {models[0]} and {models[1]}")
        for model in models:
            if any(word.split("=")[0] in ("--model", "--model-path", "-m") for word in argv):
                self.error(f"give one model, either {model} or --model")
            options.model = model
        return options

    def _hint(self, flag: str) -> str:
        """Return the replacement of an unknown flag, or the names of similar flags, or ""."""
        if instead := refused_flags().get(flag):
            return f"; {instead}"
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        names = [name for action in shown for name in action.option_strings]
        return near_names(flag, [*names, *self.further_flags])


def build_parser() -> ArgumentParser:
    """All flags of `minisgl`, grouped as in flags.toml."""
    parser = ArgumentParser(
        prog="minisgl",
        usage=argparse.SUPPRESS,
        description=_EXAMPLES,
        epilog=_PLACES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help.")
    version = f"minisgl {minisgl.__version__}"
    parser.add_argument("--version", action="version", version=version, help="Show the version.")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings.")
    for title, flags in read_flags().items():
        group = parser.add_argument_group(title)
        for names, flag in flags.items():
            if "instead" in flag:
                continue
            action = group.add_argument(*names.split(), **_argument(flag))
            if is_switch(flag) and "help" in flag:
                off = f"--no-{names.split()[0].removeprefix('--')}"
                group.add_argument(
                    off, dest=action.dest, action="store_false", help=argparse.SUPPRESS
                )
    return parser


def _argument(flag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of add_argument for one flag. `to` becomes `dest`."""
    argument: dict[str, Any] = {}
    default: Any = None
    if "to" in flag:
        section, field = flag["to"].split(".")
        fields = msgspec.structs.fields(_SECTIONS.get(section, ServerConfig))
        default = next(f.default for f in fields if f.name == field)
        argument["dest"] = flag["to"]
    shown = "" if default in (None, ()) or default is False else f" Default: {default}."
    argument["help"] = flag["help"] + shown if "help" in flag else argparse.SUPPRESS
    argument["default"] = default
    if is_switch(flag):
        return argument | {"action": "store_true"}
    if "low" in flag:
        kind = int if flag["type"] == "int" else float
        argument["type"] = _bounded(kind, flag["low"], flag.get("high", _HIGHEST[kind]))
    nargs = "+" if flag.get("many") else None
    return argument | {"choices": flag.get("choices"), "metavar": flag.get("unit"), "nargs": nargs}


def _bounded(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            expected = "an integer" if kind is int else "a number"
            upper = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {expected} of at least {low:g}{upper}")
        return value

    return parse
