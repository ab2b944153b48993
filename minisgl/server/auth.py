"""Authenticates requests by keys, which it compares by their hashes.

If the server has API keys, all paths need a key except the probes, /metrics and the files of /docs.
The admin paths always need an admin key.
"""

import hashlib
import hmac
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.core import ConfigError
from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.middleware import DOCS_PATHS, OPEN_PATHS, error_response

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


def key_hashes(keys: Iterable[str | None], file: str | None) -> tuple[str, ...]:
    """SHA-256 in hex of each key and of each line of `file`. Raises ConfigError."""
    found = [key for key in keys if key is not None]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {file} cannot be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"the key file {file} has no key; expected one per line")
    if any(not key.strip() for key in found):
        raise ConfigError("an API key is empty; give a key, or leave the flag or variable out")
    return tuple(_hash(key.strip().encode()) for key in found)


class Auth:
    """Passes a request on if its key is valid, or answers 401 or 403.

    Without `keys`, all paths but the admin paths are open. Admin paths need one of `admin_keys`,
    which are also valid for all other paths.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], admin_keys: Collection[str]) -> None:
        self._app = app
        self._keys = (*keys, *admin_keys) if keys else ()
        self._admin_keys = tuple(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope["path"])(scope, receive, send)

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
        given = _hash(_key(scope))
        # All keys are compared, so that the duration does not depend on the key.
        matches = [hmac.compare_digest(given, key) for key in allowed]
        return None if any(matches) else NotAuthenticated("a valid API key is required")


def _key(scope: Scope) -> bytes:
    """The key in `Authorization: Bearer`, or else in `x-api-key` (Anthropic's clients)."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = headers.get("x-api-key", "")
    return token.encode("latin-1").strip()


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
