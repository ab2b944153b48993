"""Refuses requests from foreign web pages, and bodies that are not JSON.

A browser on the machine of the user reaches a server on a loopback address. Without keys, nothing
else keeps a web page from using the server. A page can reach the server in two ways:

    DNS rebinding         the page lets its own name resolve to 127.0.0.1. The browser sees one
                          origin, but the Host header still has the name of the page.
    cross-origin request  the page sends a request to http://127.0.0.1:1919. The browser adds the
                          origin of the page. It asks the server first (CORS), except for simple
                          requests, which have no JSON content type.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.errors import ForbiddenHost, ForbiddenOrigin, UnsupportedMediaType
from minisgl.settings.config import ServerConfig


def check_headers(config: ServerConfig, scope: Scope) -> None:
    """Check the Host, Origin and Content-Type headers of a request, the probes included.

    Host is checked without keys, if the server listens on a loopback address. Origin is checked
    without keys. Content-Type is checked always, if the request has a body. Raises ForbiddenHost,
    ForbiddenOrigin or UnsupportedMediaType.
    """
    headers = Headers(scope=scope)
    if not config.api_key_hashes:
        host, origin = headers.get("host", ""), headers.get("origin")
        address, _ = scope.get("server") or ("", None)
        # A server on all addresses also accepts connections to 127.0.0.1. Other machines
        # reach it by names that it does not know, so Host is not checked.
        if config.host not in ("", "0.0.0.0", "::") and _is_loopback(address):
            name = _hostname(host)
            own = map(_plain, ("localhost", config.host, *config.allowed_hosts))
            if name not in own and not _is_loopback(name):
                raise ForbiddenHost(
                    f"the Host header names {host[:64]!r}, which is not a name of this server; "
                    "use localhost, or start the server with --allow-host NAME or with a key"
                )
        if origin is not None:
            # The scheme of the server's own pages is not compared, because a proxy may end TLS.
            is_own = origin.partition("://")[2].lower() == host.lower()
            if not is_own and not {origin, "*"} & {*config.allowed_origins}:
                raise ForbiddenOrigin(
                    f"web pages of {origin[:64]!r} may not call this server; start it with "
                    "--allow-origin ORIGIN or with a key"
                )
    kind = headers.get("content-type", "")
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if has_body and not _is_json(kind):
        raise UnsupportedMediaType(
            "the header Content-Type of a request with a body must be application/json, not "
            f"{kind[:64]!r}"
        )


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _hostname(host: str) -> str:
    """The name or address in a Host header, without the port; "" if the header is malformed."""
    try:
        return _plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_json(content_type: str) -> bool:
    """Whether the media type is JSON, as application/json and application/problem+json are."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind[-5:] == "+json")
