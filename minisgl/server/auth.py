"""Who may call what: bearer keys, compared by their hashes. Everything is closed by default."""

import hashlib
import hmac
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.core import ConfigError
from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.middleware import DOCS_PATHS, OPEN_PATHS, error_answer

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


def key_hashes(keys: Iterable[str | None], file: str | None) -> tuple[str, ...]:
    """SHA-256 of each key and of each line of the file. Raises ConfigError."""
    found = [key for key in keys if key is not None]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {file} cannot be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"the key file {file} holds no key")
    if any(not key.strip() for key in found):
        raise ConfigError("an API key must not be empty")
    return tuple(_hash(key.strip().encode()) for key in found)


class Auth:
    """Lets a request pass to its route, or answers 401 or 403.

    Without keys all but the admin routes are open; those need a key of their own in any case.
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
            await error_answer(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> NotAuthenticated | AdminOnly | None:
        # The path of the scope is what the router matches; one made of headers can be forged.
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
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given, key) for key in allowed]
        return None if any(matches) else NotAuthenticated("a valid API key is required")


def _bearer(scope: Scope) -> bytes:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.encode("latin-1").strip() if scheme.lower() == "bearer" else b""


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
