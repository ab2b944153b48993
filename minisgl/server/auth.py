"""Authenticates requests by keys. The server compares hashes of keys, and not the keys.

If the server has API keys, all paths need a key except the probes, /metrics and the files of the
web pages. The admin paths always need an admin key. server/keys.py reads the keys.
"""

import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.keys import hash_key
from minisgl.server.middleware import OPEN_PATHS, error_response
from minisgl.server.pages import PAGE_PATHS

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


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
        given = hash_key(_key(scope))
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
