"""The routes about the server: models, the admin paths, probes, metrics, the pages."""

import time
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

import minisgl
from minisgl.core import Cancelled
from minisgl.protocol import responses
from minisgl.protocol.messages_api import ModelInfo, ModelPage
from minisgl.server.context import CallContext, ContextDep
from minisgl.server.edge import probes
from minisgl.server.edge.middleware import json_response
from minisgl.server.pages import find_page

router = APIRouter(redirect_slashes=False)
_get = partial(router.api_route, methods=["GET", "HEAD"])

_STARTED_AT = int(time.time())
_ANTHROPIC = "anthropic-version"  # the header that Anthropic's clients send with each request


@_get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(context: ContextDep) -> Response:
    """The special tokens, the chat template and the vocabulary size, in the format of vLLM."""
    context.service.lifecycle.require_accepting()
    return json_response(context.service.lifecycle.tokenizer)


@_get("/version", tags=["models"])
async def version(context: ContextDep) -> Response:
    """The version of minisgl."""
    return json_response(responses.VersionResponse(minisgl.__version__))


@_get("/v1/models", tags=["models"])
async def list_models(context: ContextDep) -> Response:
    """Every name under which the model is served.

    With the header anthropic-version, the answer has the form of Anthropic's API.
    """
    names = context.service.config.served_names
    if _ANTHROPIC in context.request.headers:
        infos = [_model_info(context, name) for name in names]
        return json_response(ModelPage(data=infos, first_id=names[0], last_id=names[-1]))
    return json_response(responses.ModelList(data=[_model_card(context, name) for name in names]))


@_get("/v1/models/{model_id:path}", tags=["models"])
async def get_model(context: ContextDep, model_id: str) -> Response:
    """One served name. Model ids may contain slashes. The header is as in /v1/models."""
    context.converter.check_model(model_id)
    in_anthropics_form = _ANTHROPIC in context.request.headers
    return json_response((_model_info if in_anthropics_form else _model_card)(context, model_id))


def _model_card(context: CallContext, name: str) -> responses.ModelCard:
    facts = context.service.lifecycle.facts
    return responses.ModelCard(
        id=name,
        created=_STARTED_AT,
        max_model_len=facts.max_seq_len if facts else None,
        sampling_defaults=context.converter.sampling_defaults(facts) if facts else None,
    )


def _model_info(context: CallContext, name: str) -> ModelInfo:
    facts = context.service.lifecycle.facts
    length = facts.max_seq_len if facts else None
    started_at = datetime.fromtimestamp(_STARTED_AT, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=started_at,
        max_input_tokens=length,
        max_tokens=length,
    )


# `check_key` lets only the admin keys pass to the three admin paths.
@_get("/server_info", tags=["admin"])
async def server_info(context: ContextDep) -> Response:
    """Version, limits, the model's facts and the live state. It holds no paths and no secrets."""
    service = context.service
    return json_response(
        {
            "version": minisgl.__version__,
            "phase": service.lifecycle.phase,
            "served_names": service.config.served_names,
            "open_requests": service.engine.open_calls,
            "limits": service.config.limits,
            "scheduler": service.config.scheduler,
            "model": service.lifecycle.facts,
            "stats": service.stats,
        }
    )


@router.post("/abort", tags=["admin"])
async def abort(context: ContextDep) -> Response:
    """End every open call whose x-request-id equals `request_id`."""
    request_id = context.converter.read_abort(await context.read_body())
    error = Cancelled("this request was aborted by an operator")
    return json_response(responses.AbortResponse(context.engine.end_by_id(request_id, error)))


@router.post("/flush_cache", tags=["admin"])
async def flush_cache(context: ContextDep) -> Response:
    """Forget the cached prefixes that no running request uses.

    Requests that arrive after the answer find none of them.
    """
    context.require_engine()
    context.service.lifecycle.require_accepting()
    context.engine.flush_cache()
    return json_response(responses.StatusResponse("ok"))


@_get("/livez", tags=["probes"])
async def livez(context: ContextDep) -> Response:
    """200 while every process runs and makes progress; otherwise 503."""
    return probes.answer(context.service.lifecycle, context.request.scope["path"])


@_get("/readyz", tags=["probes"])
@_get("/health", name="health", tags=["probes"])
@_get("/ping", name="ping", tags=["probes"])
async def readyz(context: ContextDep) -> Response:
    """200 while the model is loaded and the server does not drain; otherwise 503."""
    return probes.answer(context.service.lifecycle, context.request.scope["path"])


@_get("/metrics", tags=["probes"])
async def metrics(context: ContextDep) -> Response:
    """All metrics in the text format of Prometheus, or in OpenMetrics if the client accepts it."""
    engine, accept = context.engine, context.request.headers.get("accept", "")
    lifecycle, choices = context.service.lifecycle, engine.open_choices
    is_stalled = lifecycle.stalled is not None
    body, media_type = engine.metrics.render(accept, lifecycle.phase, is_stalled, choices)
    return Response(body, headers={"content-type": media_type})


@_get("/openapi.json", include_in_schema=False)
async def openapi_document(context: ContextDep) -> Response:
    """The OpenAPI document of this server."""
    return json_response(context.request.app.openapi())


@_get("/", include_in_schema=False)
@_get("/playground/{name}", include_in_schema=False)
@_get("/docs", include_in_schema=False)
@_get("/docs/{name}", include_in_schema=False)
async def web_page(context: ContextDep, name: str = "") -> Response:
    """A page, or a script or style sheet of one, by the whole path. name: the end of the path."""
    path = context.request.scope["path"]
    config = context.service.config
    page = find_page(path, with_playground=not (config.no_playground or config.render_only))
    if page is None:
        raise HTTPException(404)
    # FileResponse sends the file in parts. It waits until the client has read the previous part.
    return FileResponse(page.files[path], headers=page.headers)
