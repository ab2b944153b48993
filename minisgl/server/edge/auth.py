"""Authenticates requests by keys. The server looks up the hash of a key, and not the key.

If the server has API keys, all paths need a key except the probes, /metrics and the files of the
web pages. The admin paths always need an admin key. settings/keys.py reads the keys.
"""

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.edge.middleware import OPEN_PATHS
from minisgl.server.errors import AdminOnly, NotAuthenticated
from minisgl.server.pages import PAGE_PATHS
from minisgl.settings.config import ServerConfig
from minisgl.settings.keys import hash_key

ADMIN_PATHS = frozenset({"/abort", "/flush_cache", "/server_info"})


def check_key(config: ServerConfig, scope: Scope) -> None:
    """Refuse a request that may not use its path, and store its client in the state of the scope.

    Without API keys, all paths but the admin paths are open. Admin paths need an admin key, which
    is also valid for all other paths. Raises AdminOnly or NotAuthenticated.
    """
    # Check the path that the router matches. A client can forge a path in headers.
    path = scope["path"]
    if path in OPEN_PATHS or path in PAGE_PATHS:
        return
    is_admin = path in ADMIN_PATHS
    allowed = config.admin_key_hashes if is_admin else config.api_key_hashes
    if is_admin and not allowed:
        raise AdminOnly("this path is closed; start the server with --admin-api-key to open it")
    if not allowed:
        return
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = headers.get("x-api-key", "")  # Anthropic's clients
    # The time of the look-up depends on the hash only, which tells nothing about the key.
    given = hash_key(token.encode("latin-1").strip())
    client = allowed.get(given) or config.admin_key_hashes.get(given)
    if client is None:
        raise NotAuthenticated("a valid API key is required")
    scope["state"]["client"] = client
