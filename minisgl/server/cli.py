"""The command line: grouped flags with units and defaults, resolved into one `ServerConfig`."""

import argparse
import math
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

import minisgl
from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.server.auth import key_hashes
from minisgl.server.config import Limits, ServerConfig
from minisgl.server.env import read_env
from minisgl.utils import near_names

_SECTIONS: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {"engine": EngineConfig, "scheduler": SchedulerConfig, "limits": Limits, "server": ServerConfig}
)


# Days, where it is seconds; the kernel has 31 bits for the milliseconds of --read-timeout.
_HIGHEST: Mapping[type, float] = MappingProxyType({int: math.inf, float: 1e6})


class ArgumentParser(argparse.ArgumentParser):
    """Errors are one line with near names; flags are never abbreviated."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message}; see --help\n")
        sys.exit(2)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or exit 2 naming the unknown flag and the nearest known ones."""
        options, rest = self.parse_known_args(argv)
        if rest:
            flag = rest[0].split("=")[0]
            self.error(f"unknown argument {flag}{near_names(flag, self._option_string_actions)}")
        return options


def build_parser() -> ArgumentParser:
    """All flags of `minisgl`, grouped as in flags.toml."""
    parser = ArgumentParser(
        prog="minisgl",
        description="Serve a language model over the OpenAI API. Without --model: a demo model.",
        epilog="Further commands: minisgl bench ..., minisgl compile ...",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {minisgl.__version__}")
    for title, flags in _read_flags().items():
        group = parser.add_argument_group(title)
        for names, flag in flags.items():
            group.add_argument(*names.split(), **_argument(flag))
    return parser


def _read_flags() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text())


def _argument(flag: dict[str, Any]) -> dict[str, Any]:
    """What argparse must know of one flag."""
    default = None
    if "to" in flag:
        section, field = flag["to"].split(".")
        fields = msgspec.structs.fields(_SECTIONS[section])
        default = next(f.default for f in fields if f.name == field)
    shown = "" if default in (None, ()) or default is False else f" (default: {default})"
    argument = {"help": flag["help"] + shown, "default": default}
    if "choices" in flag:
        return argument | {"choices": flag["choices"]}
    if "type" not in flag:
        return {**argument, "action": "store_true", "default": False}
    if flag["type"] in ("int", "float"):
        kind = int if flag["type"] == "int" else float
        argument["type"] = _bounded(kind, flag["low"], flag.get("high", _HIGHEST[kind]))
    return {**argument, "metavar": flag["unit"], "nargs": "+" if flag.get("many") else None}


def _bounded(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            what = "an integer" if kind is int else "a number"
            upper = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {low:g}{upper}")
        return value

    return parse


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    resolve_model: Callable[[str, str | None, bool], str],
    demo_path: Callable[[], Path],
    weights: bool = True,
) -> ServerConfig:
    """Parse flags and environment, find the model, and return the complete configuration.

    weights: False needs a model's configuration and tokenizer only, as --dummy-weight does.

    Exits with 2 for a wrong flag; raises ConfigError for a model or setting that cannot be used.
    """
    options = build_parser().parse_strictly(argv)
    settings = read_env(environ)
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
    if options.ssl_certfile is not None:
        if options.shell:
            raise ConfigError("--shell speaks no HTTPS; leave --ssl-certfile away")
        _check_certificate(options.ssl_certfile, options.ssl_keyfile)
    keys = key_hashes([options.api_key, settings.api_key], options.api_key_file)
    given_keys = [options.admin_api_key, settings.admin_api_key]
    admin_keys = key_hashes(given_keys, options.admin_api_key_file)
    if options.model is None:
        folder = str(demo_path())
    else:
        needs_weights = weights and not options.dummy_weight
        folder = resolve_model(options.model, options.revision, needs_weights)
    given: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for flags in _read_flags().values():
        for names, flag in flags.items():
            if "to" in flag:
                section, field = flag["to"].split(".")
                value = getattr(options, names.split()[0][2:].replace("-", "_"))
                given[section][field] = tuple(value) if isinstance(value, list) else value
    engine, scheduler = given["engine"], given["scheduler"]
    engine["kernel_cache"] = engine["kernel_cache"] or settings.kernel_cache
    scheduler["target_step_ms"] = scheduler["target_step_ms"] or None
    return ServerConfig(
        engine=EngineConfig(model_path=folder, **engine),
        scheduler=SchedulerConfig(
            **scheduler,
            overlap=not settings.disable_overlap_scheduling,
            check_plans=settings.check_plans,
        ),
        limits=Limits(**given["limits"]),
        commit=settings.commit or _commit(),
        served_names=tuple(options.served_model_name or [_served_name(options.model)]),
        log_level=options.log_level or ("warning" if options.shell else "info"),
        api_key_hashes=keys,
        admin_key_hashes=admin_keys,
        **given["server"],
    )


def _check_certificate(certfile: str, keyfile: str) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile, password="")  # or it would ask the terminal
    except OSError as error:
        text = f"{certfile} and {keyfile} are no certificate and its key: {error}"
        raise ConfigError(text) from None


def _served_name(model: str | None) -> str:
    """The Hugging Face id; of a folder only its name, so that no path is told to clients."""
    if model is None:
        return "minisgl-demo"
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _commit() -> str:
    """Of the checkout that this runs from; installed packages do not know theirs."""
    root = Path(minisgl.__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
