"""The API keys of the command line and of key files, as hashes.

The launcher reads the keys before it starts the other processes. This module imports no HTTP
library, so that the launcher starts these processes early.

A line of a key file is a key, `name: key` or `name priority=NUMBER: key`. The name identifies the
client that sends a request with this key. Clients take turns. NUMBER is the lowest priority that
these requests may have; its default is 0. Several lines may have the same name, so that a client
can change its key. White space must follow the colon. Every other line is a key without a name,
even if it has spaces. All keys without a name, and all requests to a server without keys, belong
to the client DEFAULT_CLIENT.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from minisgl.core import ConfigError
from minisgl.settings.config import DEFAULT_CLIENT

# A colon with white space after it ends the name of a key.
_NAMED = re.compile(r"(?P<name>.*?)(?:[ \t]+priority=(?P<lowest>-?[0-9]{1,9}))?:[ \t]+(?P<key>.+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def key_hashes(keys: Iterable[str | None], file: str | None) -> dict[str, str]:
    """Map the SHA-256 of each key in `keys` and in `file`, in hex, to the client of the key.

    Raises ConfigError.
    """
    found = [(DEFAULT_CLIENT, key) for key in keys if key is not None]
    if file is not None:
        found += [(client, key) for client, key, _ in _read_file(file)]
    clients: dict[str, str] = {}
    for client, key in found:
        if not key.strip():
            raise ConfigError("an API key is empty; give a key, or leave the flag or variable out")
        other = clients.setdefault(hash_key(key.strip().encode()), client)
        if other != client:
            raise ConfigError(
                f"the clients {other} and {client} have the same key; give each a key of its own"
            )
    return clients


def lowest_priorities(*files: str | None) -> dict[str, int]:
    """Return the lowest priority of each client that has one in a key file. Raises ConfigError."""
    found: dict[str, int] = {}
    for client, _, lowest in (line for file in files if file for line in _read_file(file)):
        if lowest is not None and found.setdefault(client, lowest) != lowest:
            raise ConfigError(
                f"the key files give the client {client} the lowest priorities {found[client]} and "
                f"{lowest}; give it one"
            )
    return found


def _read_file(file: str) -> list[tuple[str, str, int | None]]:
    """Return client, key and lowest priority of each line with a key. Raises ConfigError."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        named = _NAMED.fullmatch(line)
        if named is not None and not _NAME.fullmatch(named["name"]):
            raise ConfigError(
                f"line {number} of the key file {file} begins with an invalid name of a "
                "key; expected 1 to 63 letters, digits, dots, dashes and underscores"
            )
        if line:
            client, lowest, key = named.groups() if named else (DEFAULT_CLIENT, None, line)
            found.append((client, key, None if lowest is None else int(lowest)))
    if not found:
        raise ConfigError(f"the key file {file} has no key; expected one per line")
    return found


def hash_key(key: bytes) -> str:
    """Return the SHA-256 of a key, in hex."""
    return hashlib.sha256(key).hexdigest()
