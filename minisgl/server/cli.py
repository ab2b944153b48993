"""The command line and the MINISGL_* variables, resolved into one `ServerConfig`.

The flags are data in flags.toml. Kubernetes injects variables such as MINISGL_PORT,
MINISGL_PORT_1919_TCP and MINISGL_SERVICE_HOST for a Service named minisgl. These variables are no
settings, so `read_env` ignores them without a warning.
"""

import argparse
import logging
import math
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import minisgl
from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.server.auth import key_hashes, lowest_priorities
from minisgl.server.config import KVEventsConfig, Limits, ServerConfig
from minisgl.utils import log_event, near_names

logger = logging.getLogger(__name__)

_SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "engine": EngineConfig,
    "scheduler": SchedulerConfig,
    "limits": Limits,
    "kv_events": KVEventsConfig,
    "server": ServerConfig,
}
# The largest value of a flag without `high`, by type. Each float flag without `high` is a time in
# seconds. Its limit is 1e6 s (12 days), because --read-timeout goes to Linux as milliseconds in 31
# bits.
_HIGHEST: Mapping[type, float] = {int: math.inf, float: 1e6}
_INJECTED = ("MINISGL_PORT", "MINISGL_SERVICE_")


class ArgumentParser(argparse.ArgumentParser):
    """Reports an error in one line with the names of similar flags. Accepts full names only."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message}; see --help\n")
        sys.exit(2)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or exit with 2 and a line that names the unknown flag and similar ones."""
        options, rest = self.parse_known_args(argv)
        if rest:
            flag = rest[0].split("=")[0]
            self.error(f"unknown argument {flag}{near_names(flag, self._option_string_actions)}")
        return options


class EnvSettings(msgspec.Struct, frozen=True, rename=lambda field: f"MINISGL_{field.upper()}"):
    """The settings of the environment. The variable of a field is MINISGL_ and its name.

    disable_overlap_scheduling  plan a step only after reading the result of the previous step.
    check_plans                 for debugging: tensor-parallel ranks compare a hash of each plan,
                                and stop if one differs.
    api_key, admin_api_key      as the flags of these names; set by Secrets of Kubernetes.
    kernel_cache                as --kernel-cache; set by images with compiled kernels.
    commit                      the commit of the source in an image; not needed in a Git checkout.
    """

    disable_overlap_scheduling: bool = False
    check_plans: bool = False
    api_key: str | None = None
    admin_api_key: str | None = None
    kernel_cache: str | None = None
    commit: str | None = None


# Variables that hold keys. The launcher removes them before it starts other processes.
KEY_VARIABLES = ("MINISGL_API_KEY", "MINISGL_ADMIN_API_KEY")


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
            hidden = {"help": argparse.SUPPRESS} if title == "replaced" else {}
            group.add_argument(*names.split(), **_argument(flag) | hidden)
    return parser


def _read_flags() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text())


def _argument(flag: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of add_argument for one flag. Its `to` is the name of the result."""
    argument: dict[str, Any] = {}
    default: Any = None
    if "to" in flag:
        section, field = flag["to"].split(".")
        fields = msgspec.structs.fields(_SECTIONS[section])
        default = next(f.default for f in fields if f.name == field)
        argument["dest"] = flag["to"]
    shown = "" if default in (None, ()) or default is False else f" (default: {default})"
    argument |= {"help": flag["help"] + shown, "default": default}
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
            expected = "an integer" if kind is int else "a number"
            upper = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {expected} of at least {low:g}{upper}")
        return value

    return parse


def read_env(environ: Mapping[str, str]) -> EnvSettings:
    """Parse all MINISGL_* variables, and log a warning for each unknown one.

    Raises ConfigError for a bad value.
    """
    known = {field.encode_name: field for field in msgspec.structs.fields(EnvSettings)}
    values: dict[str, str] = {}
    for name, text in environ.items():
        if name in known:
            # An empty switch is off. An empty key stays empty, because `key_hashes` must refuse it.
            values[name] = text.strip() or ("0" if known[name].default is False else "")
        elif name.startswith("MINISGL_") and not name.startswith(_INJECTED):
            event = "unknown environment variable ignored"
            log_event(logger, logging.WARNING, event, name=name, known=",".join(known))
    try:
        return msgspec.convert(values, EnvSettings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise ConfigError(f"{name} must be 1 or 0, not {values[name][:40]!r}") from None


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    resolve_model: Callable[[str, str | None, bool], str],
    demo_path: Callable[[], Path],
    weights: bool = True,
) -> ServerConfig:
    """Parse flags and environment, find the model, and return the complete configuration.

    resolve_model: returns the folder of a model from its name, its revision, and a flag that is
    True if the command needs the weights. weights: False for commands that need no weights.
    --dummy-weight needs none either.

    Exits with 2 for a wrong flag. Raises ConfigError for a model or setting that cannot be used.
    """
    options = build_parser().parse_strictly(argv)
    env = read_env(environ)
    given: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in vars(options).items():
        section, _, field = name.partition(".")
        if field:
            given[section][field] = tuple(value) if isinstance(value, list) else value
    engine, scheduler, server = given["engine"], given["scheduler"], given["server"]
    if server["render_only"] and server["shell"]:
        raise ConfigError("--shell needs an engine; remove --shell or --render-only")
    _check_certificate(server["ssl_certfile"], server["ssl_keyfile"], server["shell"])
    keys = key_hashes([options.api_key, env.api_key], options.api_key_file)
    admin_keys = [options.admin_api_key, env.admin_api_key]
    admin_hashes = key_hashes(admin_keys, options.admin_api_key_file)
    lowest = lowest_priorities(options.api_key_file, options.admin_api_key_file)
    if options.model is None:
        folder = str(demo_path())
    else:
        needs_weights = weights and not (engine["dummy_weight"] or server["render_only"])
        folder = resolve_model(options.model, options.revision, needs_weights)
    engine["kernel_cache"] = engine["kernel_cache"] or env.kernel_cache
    scheduler["target_step_ms"] = scheduler["target_step_ms"] or None
    _apply_replaced_flags(options, given["limits"])
    _warn_of_visible_keys(options)
    return ServerConfig(
        engine=EngineConfig(model_path=folder, **engine),
        scheduler=SchedulerConfig(
            **scheduler, overlap=not env.disable_overlap_scheduling, check_plans=env.check_plans
        ),
        limits=Limits(**given["limits"]),
        kv_events=KVEventsConfig(**given["kv_events"]),
        commit=env.commit or _commit(),
        served_names=tuple(options.served_model_name or [_served_name(options.model)]),
        log_level=options.log_level or ("warning" if server["shell"] else "info"),
        api_key_hashes=keys,
        admin_key_hashes=admin_hashes,
        lowest_priorities=lowest,
        **server,
    )


def _warn_of_visible_keys(options: argparse.Namespace) -> None:
    for flag, key in (("--api-key", options.api_key), ("--admin-api-key", options.admin_api_key)):
        if key is not None:
            logger.warning(
                "%s shows the key to every user of this machine, in the list of processes, and the "
                "server cannot hide it; use %s-file",
                flag,
                flag,
            )


def _apply_replaced_flags(options: argparse.Namespace, limits: dict[str, Any]) -> None:
    """Log a warning for each flag of an earlier version.

    --max-n and --max-prompts still lower max_choices.
    """
    for name, flag in _read_flags()["replaced"].items():
        value = getattr(options, name[2:].replace("-", "_"))
        if value is not None:
            logger.warning("the flag %s has been replaced: %s", name, flag["help"])
            if name in ("--max-n", "--max-prompts"):
                limits["max_choices"] = min(limits["max_choices"], value)


def _check_certificate(certfile: str | None, keyfile: str | None, shell: bool) -> None:
    if (certfile is None) != (keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or neither")
    if certfile is None:
        return
    if shell:
        raise ConfigError("--shell does not support HTTPS; remove --ssl-certfile and --ssl-keyfile")
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
        return "minisgl-demo"
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _commit() -> str:
    """The commit of the Git checkout that this process runs from, or "unknown"."""
    root = Path(minisgl.__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
