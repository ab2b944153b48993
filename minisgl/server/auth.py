"""Authenticates requests by keys. The server compares hashes of keys, and not the keys.

If the server has API keys, all paths need a key except the probes, /metrics and the files of the
web pages. The admin paths always need an admin key.

A line of a key file is a key, `name: key` or `name priority=NUMBER: key`. The name identifies the
client that sends a request with this key. Clients take turns. NUMBER is the lowest priority that
these requests may have; its default is 0. Several lines may have the same name, so that a client
can change its key. White space must follow the colon. Every other line is a key without a name,
even if it has spaces. All keys without a name, and all requests to a server without keys, belong
to the client DEFAULT_CLIENT.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.core import ConfigError
from minisgl.server.config import DEFAULT_CLIENT
from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.middleware import OPEN_PATHS, error_response
from minisgl.server.pages import PAGE_PATHS

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})

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
        other = clients.setdefault(_hash(key.strip().encode()), client)
        if other != client:
            raise ConfigError(
                f"the clients {other} and {client} have the same key; give each a key of its own"
            )
    return clients


def lowest_priorities(*files: str | None) -> dict[str, int]:
    """The lowest priority of each client for which a key file gives one. Raises ConfigError."""
    found: dict[str, int] = {}
    for client, _, lowest in (line for file in files if file for line in _read_file(file)):
        if lowest is not None and found.setdefault(client, lowest) != lowest:
            raise ConfigError(
                f"the key files give the client {client} the lowest priorities {found[client]} and "
                f"{lowest}; give it one"
            )
    return found


def _read_file(file: str) -> list[tuple[str, str, int | None]]:
    """Client, key and lowest priority of each line that is not empty. Raises ConfigError."""
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
            client, key = (named["name"], named["key"]) if named else (DEFAULT_CLIENT, line)
            lowest = named["lowest"] if named else None
            found.append((client, key, None if lowest is None else int(lowest)))
    if not found:
        raise ConfigError(f"the key file {file} has no key; expected one per line")
    return found


class Auth:
    """Passes a request on if its key is valid, or answers 401 or 403.

    Without `keys`, all paths but the admin paths are open. Admin paths need one of `admin_keys`,
    which are also valid for all other paths. Both arguments map the hash of each key to its client.
    Auth stores the client of a request in the state of the scope.
    """

    def __init__(
        self, app: ASGIApp, keys: Mapping[str, str], admin_keys: Mapping[str, str]
    ) -> None:
        self._app = app
        self._keys = {**admin_keys, **keys} if keys else {}
        self._admin_keys = admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> NotAuthenticated | AdminOnly | None:
        # Check the path that the router matches. A client can forge a path in headers.
        path = scope["path"]
        if path in OPEN_PATHS or path in PAGE_PATHS:
            return None
        if path in ADMIN_PATHS:
            if not self._admin_keys:
                return AdminOnly(
                    "this path is closed; start the server with --admin-api-key to open it"
                )
            allowed = self._admin_keys
        elif self._keys:
            allowed = self._keys
        else:
            return None
        given = _hash(_key(scope))
        # All keys are compared, so that the duration does not depend on the key.
        matches = [hmac.compare_digest(given, key) for key in allowed]
        if not any(matches):
            return NotAuthenticated("a valid API key is required")
        scope["state"]["client"] = allowed[given]
        return None


def _key(scope: Scope) -> bytes:
    """The key in `Authorization: Bearer`, or else in `x-api-key` (Anthropic's clients)."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = headers.get("x-api-key", "")
    return token.encode("latin-1").strip()


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
