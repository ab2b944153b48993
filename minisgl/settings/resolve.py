"""The command line and the MINISGL_* variables, resolved into one `ServerConfig`.

The flags are data in flags.toml. places.py reads their variables and their keys in a file.
"""

import argparse
import logging
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import minisgl
from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.settings.command_line import build_parser
from minisgl.settings.config import DEMO_NAME, KVEventsConfig, Limits, ServerConfig
from minisgl.settings.hub import resolve_model
from minisgl.settings.keys import key_hashes, lowest_priorities
from minisgl.settings.model_folder import FindModel, with_model
from minisgl.settings.places import (
    environment_words,
    file_words,
    flag_variables,
    is_injected,
    is_on,
    read_flags,
)
from minisgl.utils import log_event, near_names

logger = logging.getLogger(__name__)

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
    find_model: FindModel = resolve_model,
    before_download: Callable[[ServerConfig], None] = lambda config: None,
    command: tuple[str, ...] = ("minisgl",),
) -> ServerConfig:
    """Parse flags and environment, find the model, and return the complete configuration.

    weights: False for commands that need no weights. --dummy-weight needs none either.
    find_model: tests pass a function that downloads nothing.
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
    config = ServerConfig(
        engine=EngineConfig(model_path="", **engine),
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
    needs_weights = weights and not server["render_only"]
    found = with_model(config.engine, options.model, options.revision, needs_weights, find_model)
    return msgspec.structs.replace(config, engine=found)


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
