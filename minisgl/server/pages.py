"""The web pages of the server: the playground at / and the description of the API at /docs.

The files of a page need no key, because they hold no data. If the server has keys, the script of
the page asks the reader for one, and sends it with each call. A content security policy keeps the
browser from loading anything from another host.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import minisgl

_PACKAGE = Path(minisgl.__file__).parent
_SUFFIXES = (".js", ".css", ".svg")  # The folders also have licenses, which are not served.


class WebPage(NamedTuple):
    """files: the file of each URL path. headers: the headers of every response with a file."""

    files: Mapping[str, Path]
    headers: Mapping[str, str]


def _page(path: str, prefix: str, folder: Path, policy: str) -> WebPage:
    """A page with index.html at `path`, and the other files at the prefix plus their names."""
    files = {prefix + file.name: file for file in folder.iterdir() if file.suffix in _SUFFIXES}
    files[path] = folder / "index.html"
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": f"default-src 'none'; script-src 'self'; connect-src 'self'; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; {policy}",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return WebPage(files, headers)


DOCS = _page(
    "/docs",
    "/docs/",
    _PACKAGE / "server" / "docs_page",
    # Swagger UI sets style attributes, and draws its icons from data: URLs.
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:",
)
PLAYGROUND = _page(
    "/",
    "/playground/",
    _PACKAGE / "playground",
    # Without a Trusted Types policy, the browser refuses to parse any string as HTML.
    # The thumbnails of attached images are data: URLs, which no other host sees.
    "style-src 'self'; img-src 'self' data:; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
)
PAGE_PATHS = frozenset({*DOCS.files, *PLAYGROUND.files})


def find_page(path: str, with_playground: bool) -> WebPage | None:
    """The page that has a file at this path."""
    pages = (DOCS, PLAYGROUND) if with_playground else (DOCS,)
    return next((page for page in pages if path in page.files), None)
