"""/openapi.json and the page that shows it: Swagger UI, served from files in this package.

/docs and its files need no key, because they hold no data. The script of the page asks the reader
for a key where the server has keys, and reads /openapi.json with it. A content security policy
keeps the browser from loading anything from another host.
"""

from pathlib import Path
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from minisgl.server.middleware import DOCS_PATHS, answer
from minisgl.server.routing import new_router

docs_router = new_router("docs")

_FOLDER = Path(__file__).parent / "docs_page"
_HEADERS = MappingProxyType(
    {
        "cache-control": "no-cache",
        # Swagger UI sets style attributes, and draws its icons from data: URLs.
        "content-security-policy": "default-src 'none'; script-src 'self'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'",
    }
)


@docs_router.get("/openapi.json", include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    """The OpenAPI document of this server."""
    return answer(request.app.openapi())


@docs_router.get("/docs", include_in_schema=False)
@docs_router.get("/docs/{name}", include_in_schema=False)
async def docs_page(request: Request) -> Response:
    """The page, or a script or style sheet of it."""
    if request.scope["path"] not in DOCS_PATHS:
        raise HTTPException(404)
    name = request.path_params.get("name", "index.html")
    # FileResponse sends the file in parts, each when the client has read the one before.
    return FileResponse(_FOLDER / name, headers=_HEADERS)
