"""The places of a setting besides the command line: the environment and the file of --config.

Each name of a flag in flags.toml gives a variable, MINISGL_ and the name, and a key in the file,
which is the name without the dashes. The command line wins over the environment, and the
environment over the file.

Kubernetes injects variables for each Service of a namespace: MINISGL_PORT, MINISGL_SERVICE_HOST and
MINISGL_PORT_1919_TCP for a Service named minisgl. Such variables are no settings. --port therefore
has the variable MINISGL_HTTP_PORT. A Service named minisgl-http gives that variable an address such
as tcp://10.0.0.1:80, which is no setting either.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.settings.config import ServerConfig
from minisgl.utils import near_names

_INJECTED_NAME = re.compile(
    r"MINISGL_(PORT_|SERVICE_)|MINISGL_\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))"
)
_INJECTED_VALUE = re.compile(r"(tcp|udp|sctp)://")
# `resolve` reads the variables of these flags, because a key of the environment does not replace
# the key of the flag.
_KEYS = ("--api-key", "--admin-api-key")
_SWITCH_WORDS = {"1": True, "true": True, "0": False, "false": False}

Flag = Mapping[str, Any]


@cache  # a start asks for the flags four times or more, and one parse takes 3 ms
def read_flags() -> Mapping[str, Mapping[str, Flag]]:
    """Return the flags of flags.toml: section, names and properties. All callers share them."""
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text())


def is_switch(flag: Mapping[str, Any]) -> bool:
    """Whether a flag of flags.toml takes no value."""
    return "type" not in flag and "choices" not in flag


def is_injected(name: str, value: str) -> bool:
    """Whether Kubernetes has injected this variable for a Service, so that it is no setting."""
    is_address = name.endswith("_PORT") and _INJECTED_VALUE.match(value)
    return bool(_INJECTED_NAME.match(name) or is_address)


def flag_variables() -> dict[str, tuple[str, Flag]]:
    """Return the variables of all flags, with the first name and the properties of the flag.

    The variables of further names come first, so that the variable of the first name wins.
    """
    settings = [(names, flag) for names, flag in _settings() if names[0] not in _KEYS]
    further = {_variable(name): (names[0], flag) for names, flag in settings for name in names[1:]}
    return further | {_variable(names[0]): (names[0], flag) for names, flag in settings}


def flag_fields() -> dict[str, str]:
    """Return the field of the engine or the scheduler that each flag fills, by the flag's names.

    The names have underscores instead of dashes: max_model_len gives max_seq_len.
    """
    return {
        name.lstrip("-").replace("-", "_"): flag["to"].partition(".")[2]
        for names, flag in _settings()
        if flag.get("to", "").startswith(("engine.", "scheduler."))
        for name in names
    }


def refused_flags() -> dict[str, str]:
    """Return the replacement of each flag of another server that minisgl refuses."""
    flags = [entry for section in read_flags().values() for entry in section.items()]
    return {
        name: flag["instead"]
        for names, flag in flags
        if "instead" in flag
        for name in names.split()
    }


def command_line(config: ServerConfig) -> list[str]:
    """Return the flags of the engine and of the scheduler that are not at their defaults."""
    words: list[str] = []
    for names, flag in _settings():
        section, _, field = flag.get("to", "").partition(".")
        if section in ("engine", "scheduler"):
            holder = getattr(config, section)
            value = getattr(holder, field)
            if value != next(f.default for f in msgspec.structs.fields(holder) if f.name == field):
                # None can be given only as --target-step-ms=0. It is the default of other flags.
                words += _words(names[0], flag, 0 if value is None else value)
    return words


def is_on(environ: Mapping[str, str], variable: str) -> bool:
    """Return True if the variable is 1 or true. An empty variable is 0.

    Raises ConfigError for a value other than 1, true, 0 and false.
    """
    text = environ.get(variable, "").strip().lower() or "0"
    if text not in _SWITCH_WORDS:
        raise ConfigError(f"{variable} must be 1 or 0, not {text[:40]!r}")
    return _SWITCH_WORDS[text]


def file_words(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a place and the words of a command line for each setting of a TOML file.

    The place, such as "server.toml: port", names the setting in an error message. Raises
    ConfigError for a file that cannot be read, an unknown key and a value of a wrong kind.
    """
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file {path} of --config cannot be read: {error}") from None
    known = {name.lstrip("-"): (names[0], flag) for names, flag in _settings() for name in names}
    for key, value in content.items():
        place, spelled = f"{path}: {key}", key.replace("_", "-")
        if spelled not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{near_names(spelled, known)}")
        name, flag = known[spelled]
        if is_switch(flag) != isinstance(value, bool):
            expected = "true or false" if is_switch(flag) else "a text or a number"
            raise ConfigError(f"{place} must be {expected}, not {str(value)[:40]!r}")
        if isinstance(value, dict) or (isinstance(value, list) and not flag.get("many")):
            raise ConfigError(f"{place} must be one value, without a table or a list")
        yield place, _words(name, flag, value)


def environment_words(environ: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the variable and the words of a command line for each setting of the environment.

    An empty variable is no setting. A comma separates the values of a flag with several values.
    Raises ConfigError for a switch that is neither 1 nor 0.
    """
    for variable, (name, flag) in flag_variables().items():
        text = environ.get(variable, "").strip()
        if not text or is_injected(variable, text):
            continue
        value: Any = [part.strip() for part in text.split(",")] if flag.get("many") else text
        if is_switch(flag):
            value = is_on(environ, variable)
        yield variable, _words(name, flag, value)


def _settings() -> Iterator[tuple[list[str], Flag]]:
    """Yield names and properties of each flag that has a variable and a key in the file."""
    for flags in read_flags().values():
        for names, flag in flags.items():
            if "help" in flag:
                yield names.split(), flag


def _variable(name: str) -> str:
    # Kubernetes injects MINISGL_PORT.
    word = "HTTP_PORT" if name == "--port" else name.lstrip("-").replace("-", "_").upper()
    return f"MINISGL_{word}"


def _words(name: str, flag: Mapping[str, Any], value: Any) -> list[str]:
    """Return the words of a command line that give this flag this value."""
    if is_switch(flag):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if flag.get("many"):
        return [name, *map(str, value if isinstance(value, list) else [value])]
    return [f"{name}={value}"]
