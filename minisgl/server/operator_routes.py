"""The routes for operators and their tools: probes, metrics, server info, abort, flush."""

from starlette.requests import Request
from starlette.responses import Response

import minisgl
from minisgl.core import Cancelled
from minisgl.server.errors import RETRY_AFTER
from minisgl.server.lifecycle import Phase
from minisgl.server.middleware import answer
from minisgl.server.protocol.responses import AbortResponse, StatusResponse
from minisgl.server.routing import CallDep, ConverterDep, ServiceDep, new_router

probe_router = new_router("probes")
admin_router = new_router("admin")  # `Auth` lets only the admin keys pass.


@probe_router.get("/livez")
async def livez(service: ServiceDep) -> Response:
    """200 while every process runs and makes progress; otherwise 503."""
    if service.stuck():
        return answer(StatusResponse("the scheduler makes no progress"), 503)
    if service.lifecycle.phase is Phase.FAILED:
        return answer(StatusResponse("failed"), 503)
    return answer(StatusResponse("ok"))


@probe_router.get("/readyz")
@probe_router.get("/health", name="health")
async def readyz(service: ServiceDep) -> Response:
    """200 while the model is loaded and the server does not drain; otherwise 503."""
    phase, stalled = service.lifecycle.phase, service.stalled()
    if phase is Phase.READY and not stalled:
        return answer(StatusResponse("ok"))
    status = "the scheduler makes no progress" if stalled else phase.value
    return answer(StatusResponse(status), 503, {"retry-after": RETRY_AFTER})


@probe_router.get("/metrics")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """All metrics in the text format of Prometheus, or in OpenMetrics if the client accepts it."""
    client = service.client
    accept = request.headers.get("accept", "")
    phase, stalled = service.lifecycle.phase, service.stalled()
    body, media_type = client.metrics.render(accept, phase, stalled, client.open_choices)
    return Response(body, headers={"content-type": media_type})


@admin_router.get("/server_info")
async def server_info(service: ServiceDep) -> Response:
    """Version, limits, the model's facts and the live state. It holds no paths and no secrets."""
    return answer(
        {
            "version": minisgl.__version__,
            "phase": service.lifecycle.phase,
            "served_names": service.config.served_names,
            "open_requests": service.client.open_generations,
            "limits": service.config.limits,
            "scheduler": service.config.scheduler,
            "model": service.lifecycle.facts,
            "stats": service.stats,
        }
    )


@admin_router.post("/abort")
async def abort(call: CallDep, converter: ConverterDep) -> Response:
    """End every open call whose x-request-id equals `request_id`."""
    request_id = converter.read_abort(await call.read_body())
    error = Cancelled("this request was aborted by an operator")
    return answer(AbortResponse(call.client.end_by_id(request_id, error)))


@admin_router.post("/flush_cache")
async def flush_cache(service: ServiceDep) -> Response:
    """Forget the cached prefixes that no running request uses.

    Requests that arrive after the answer find none of them.
    """
    service.lifecycle.require_accepting()
    service.client.flush_cache()
    return answer(StatusResponse("ok"))
