"""Authenticates requests by bearer keys, which it compares by their hashes.

If the server has API keys, all paths need a key except the probes, /metrics and the files of /docs.
The admin paths always need an admin key.

A line of a key file is a key, or `name: key`. The name says which client sends the request: clients
take turns. Several lines may have the same name, so that a client can change its key. All keys
without a name, and all requests to a server without keys, belong to the client DEFAULT_CLIENT.
"""

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.core import ConfigError
from minisgl.server.config import DEFAULT_CLIENT
from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.middleware import DOCS_PATHS, OPEN_PATHS, error_response

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


# A key has no spaces, so a line with a colon and a space cannot be a key without a name.
_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62}):[ \t]+)?(?P<key>\S+)")


def key_hashes(keys: Iterable[str | None], file: str | None) -> tuple[str, ...]:
    """SHA-256 in hex of each key and of the key in each line of `file`. Raises ConfigError."""
    found = [key for key in keys if key is not None]
    if file is not None:
        found += [key for _, key in _read_lines(file)]
    if any(not key.strip() for key in found):
        raise ConfigError("an API key is empty; give a key, or leave the flag or variable out")
    return tuple(_hash(key.strip().encode()) for key in found)


def key_names(file: str | None) -> dict[str, str]:
    """The name of each key of `file` that has one, by the key's SHA-256. Raises ConfigError."""
    names: dict[str, str] = {}
    for name, key in _read_lines(file) if file is not None else ():
        if name is not None and names.setdefault(_hash(key.encode()), name) != name:
            raise ConfigError(f"the key file {file} has one key for two names; give each its own")
    return names


def _read_lines(file: str) -> list[tuple[str | None, str]]:
    """Name or None, and key, of each line that is not empty. Raises ConfigError."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}") from None
    found: list[tuple[str | None, str]] = []
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if match is not None:
            found.append((match["name"], match["key"]))
        elif line.strip():
            raise ConfigError(
                f"line {number} of the key file {file} is neither a key without spaces nor "
                "'name: key'; a name has at most 63 letters, digits, dots, dashes and underscores"
            )
    if not found:
        raise ConfigError(f"the key file {file} has no key; expected one per line")
    return found


class Auth:
    """Passes a request on if its key is valid, or answers 401 or 403.

    Without `keys`, all paths but the admin paths are open. Admin paths need one of `admin_keys`,
    which are also valid for all other paths. The name of the key goes to `client` in the state of
    the scope; `names` has it by the key's hash.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        admin_keys: Collection[str],
        names: Mapping[str, str],
    ) -> None:
        self._app = app
        self._names = names
        self._keys = (*keys, *admin_keys) if keys else ()
        self._admin_keys = tuple(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> NotAuthenticated | AdminOnly | None:
        # The router matches the path of the scope. A client could forge a path from headers.
        path = scope["path"]
        if path in OPEN_PATHS or path in DOCS_PATHS:
            return None
        if path in ADMIN_PATHS:
            if not self._admin_keys:
                return AdminOnly("this path needs a server with an --admin-api-key")
            allowed = self._admin_keys
        elif self._keys:
            allowed = self._keys
        else:
            return None
        given = _hash(_bearer(scope))
        # All keys are compared, so that the duration does not depend on the key.
        matches = [hmac.compare_digest(given, key) for key in allowed]
        if not any(matches):
            return NotAuthenticated("a valid API key is required")
        scope["state"]["client"] = self._names.get(given, DEFAULT_CLIENT)
        return None


def _bearer(scope: Scope) -> bytes:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.encode("latin-1").strip() if scheme.lower() == "bearer" else b""


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
