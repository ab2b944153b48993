"""Authenticates requests by keys. The server looks up the hash of a key, and not the key.

If the server has API keys, all paths need a key except the probes, /metrics and the files of the
web pages. The admin paths always need an admin key. server/keys.py reads the keys.
"""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.keys import hash_key
from minisgl.server.middleware import OPEN_PATHS
from minisgl.server.pages import PAGE_PATHS

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


class Auth:
    """Refuses a request without a valid key.

    Without `keys`, all paths but the admin paths are open. Admin paths need one of `admin_keys`,
    which are also valid for all other paths. Both arguments map the hash of each key to its client.
    Auth stores the client of a request in the state of the scope.
    """

    def __init__(self, keys: Mapping[str, str], admin_keys: Mapping[str, str]) -> None:
        self._keys = {**admin_keys, **keys} if keys else {}
        self._admin_keys = admin_keys

    def check(self, scope: Scope) -> None:
        """Raise AdminOnly or NotAuthenticated if the request may not use its path."""
        # Check the path that the router matches. A client can forge a path in headers.
        path = scope["path"]
        if path in OPEN_PATHS or path in PAGE_PATHS:
            return
        is_admin = path in ADMIN_PATHS
        allowed = self._admin_keys if is_admin else self._keys
        if is_admin and not allowed:
            raise AdminOnly("this path is closed; start the server with --admin-api-key to open it")
        if not allowed:
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key", "")  # Anthropic's clients
        # The time of the look-up depends on the hash only, which tells nothing about the key.
        client = allowed.get(hash_key(token.encode("latin-1").strip()))
        if client is None:
            raise NotAuthenticated("a valid API key is required")
        scope["state"]["client"] = client
