"""The command line and the MINISGL_* variables, resolved into one `ServerConfig`.

The flags are data in flags.toml. places.py reads their variables and their keys in a file.
"""

import argparse
import logging
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import minisgl
from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.demo import model_path
from minisgl.settings.child import check_before_weights
from minisgl.settings.config import DEMO_NAME, KVEventsConfig, Limits, ServerConfig
from minisgl.settings.hub import Check, resolve_model
from minisgl.settings.keys import key_hashes, lowest_priorities
from minisgl.settings.places import (
    environment_words,
    file_words,
    flag_variables,
    is_injected,
    is_on,
    is_switch,
    read_flags,
    refused_flags,
)
from minisgl.utils import log_event, near_names

logger = logging.getLogger(__name__)

# The structs inside ServerConfig, by the section of `to` in flags.toml. All other fields of
# ServerConfig belong to the section "server".
_SECTIONS = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}
# The largest value of a flag without `high`, by type. Each float flag without `high` is a time in
# seconds. Its limit is 1e6 s (12 days), because --read-timeout goes to Linux as milliseconds in 31
# bits.
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


# Variables that hold keys, set by Secrets of Kubernetes. The launcher removes them before it starts
# other processes. A key of the environment does not replace the key of a flag: both are valid.
KEY_VARIABLES = ("MINISGL_API_KEY", "MINISGL_ADMIN_API_KEY")
# Plan a step only after reading the result of the previous step.
_NO_OVERLAP = "MINISGL_DISABLE_OVERLAP_SCHEDULING"
# For debugging: tensor-parallel ranks compare a hash of each plan, and stop if one differs.
_CHECK_PLANS = "MINISGL_CHECK_PLANS"
# The commit of the source in an image. It is not needed in a Git checkout.
_COMMIT = "MINISGL_COMMIT"
VARIABLES_WITHOUT_FLAG = ("MINISGL_CONFIG", *KEY_VARIABLES, _NO_OVERLAP, _CHECK_PLANS, _COMMIT)


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


def _argument(flag: dict[str, Any]) -> dict[str, Any]:
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


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Log a warning for each unknown MINISGL_* variable."""
    known = [*VARIABLES_WITHOUT_FLAG, *flag_variables()]
    for name, text in environ.items():
        if name.startswith("MINISGL_") and name not in known and not is_injected(name, text):
            event = f"unknown environment variable ignored{near_names(name, known)}"
            log_event(logger, logging.WARNING, event, name=name)


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    weights: bool = True,
    find_model: Callable[[str, str | None, bool, Check], str] = resolve_model,
    before_download: Callable[[ServerConfig], None] = lambda config: None,
    command: tuple[str, ...] = ("minisgl",),
) -> ServerConfig:
    """Parse flags and environment, find the model, and return the complete configuration.

    weights: False for commands that need no weights. --dummy-weight needs none either.
    find_model: returns the folder of a model, as resolve_model does; tests pass a function that
    downloads nothing.
    before_download: called with the configuration, whose engine.model_path is still "".
    command: the name of the command for error messages, and flags that the caller has parsed.

    Exits with 2 for a wrong flag. Raises ConfigError for a model or setting that cannot be used.
    """
    parser = build_parser()
    parser.prog, *parser.further_flags = command
    typed = parser.parse_strictly(argv)
    settings = argparse.Namespace()
    file = typed.config or environ.get("MINISGL_CONFIG", "").strip()
    for parser.place, words in [*(file_words(file) if file else ()), *environment_words(environ)]:
        parser.parse_strictly(words, settings)
    parser.place = ""
    options = parser.parse_strictly(argv, settings)
    warn_of_unknown(environ)
    given: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in vars(options).items():
        section, _, field = name.partition(".")
        if field:
            given[section][field] = tuple(value) if isinstance(value, list) else value
    engine, scheduler, server = given["engine"], given["scheduler"], given["server"]
    scheduler["target_step_ms"] = scheduler["target_step_ms"] or None
    scheduler["overlap"] = not is_on(environ, _NO_OVERLAP)
    scheduler["check_plans"] = is_on(environ, _CHECK_PLANS)
    if server["render_only"] and server["shell"]:
        raise ConfigError("--shell needs an engine; remove --shell or --render-only")
    _check_certificate(server["ssl_certfile"], server["ssl_keyfile"], server["shell"])
    key, admin_key = map(environ.get, KEY_VARIABLES)
    keys = key_hashes([options.api_key, key], options.api_key_file)
    admin_hashes = key_hashes([options.admin_api_key, admin_key], options.admin_api_key_file)
    lowest = lowest_priorities(options.api_key_file, options.admin_api_key_file)
    for most in (options.max_n, options.max_prompts):  # flags of earlier versions
        if most is not None:
            given["limits"]["max_choices"] = min(given["limits"]["max_choices"], most)
    _log_warnings(typed)
    # A wrong value raises an error here, before the download of a model.
    engine_config = EngineConfig(model_path="", **engine)
    config = ServerConfig(
        engine=engine_config,
        scheduler=SchedulerConfig(**scheduler),
        limits=Limits(**given["limits"]),
        kv_events=KVEventsConfig(**given["kv_events"]),
        commit=environ.get(_COMMIT, "").strip() or _commit(),
        served_names=tuple(options.served_model_name or [_served_name(options.model)]),
        log_level=options.log_level or ("warning" if server["shell"] else "info"),
        api_key_hashes=keys,
        admin_key_hashes=admin_hashes,
        lowest_priorities=lowest,
        **server,
    )
    before_download(config)
    if options.model is None:
        folder = str(model_path())
    else:
        needs_weights = weights and not (engine["dummy_weight"] or server["render_only"])
        check = partial(check_before_weights, engine_config)
        folder = find_model(options.model, options.revision, needs_weights, check)
    engine_config = msgspec.structs.replace(engine_config, model_path=folder)
    return msgspec.structs.replace(config, engine=engine_config)


def _log_warnings(typed: argparse.Namespace) -> None:
    """Log the text `warn` of each flag on the command line that has one."""
    for flags in read_flags().values():
        for name, flag in flags.items():  # a flag with `warn` has one name, and no `to`
            value = getattr(typed, name[2:].replace("-", "_")) if "warn" in flag else None
            if value is not None and value is not False:
                logger.warning("the flag %s %s", name, flag["warn"])


def _check_certificate(certfile: str | None, keyfile: str | None, shell: bool) -> None:
    if (certfile is None) != (keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or neither")
    if certfile is None:
        return
    if shell:
        raise ConfigError("--shell does not support HTTPS; remove --ssl-certfile and --ssl-keyfile")
    import ssl  # needed with --ssl-certfile only

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without this empty password, OpenSSL asks for the password of an encrypted key in the
        # terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except OSError as error:
        message = f"{certfile} and {keyfile} are not a certificate and its key: {error}"
        raise ConfigError(message) from None


def _served_name(model: str | None) -> str:
    """The Hugging Face id, or the name of the folder: clients do not see paths of the server."""
    if model is None:
        return DEMO_NAME
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _commit() -> str:
    """The commit of the Git checkout that this process runs from, or "unknown"."""
    folder = Path(minisgl.__file__).parents[1] / ".git"
    command = ["git", f"--git-dir={folder}", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
