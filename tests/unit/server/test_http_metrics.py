"""The metrics of HTTP responses, and those of a server without an engine."""

import asyncio

import httpx
import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families as parse_text

from minisgl.server.app import build_app
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.server.observe.metrics import Metrics
from tests.unit.server.fakes import World
from tests.unit.server.test_app import KEYED, FakeService
from tests.unit.server.test_metrics import scraped, values


def test_http_responses_count_by_route_pattern_even_while_loading() -> None:
    """An unknown path, method or model name adds no series of its own."""

    async def main() -> dict[str, float]:
        service = FakeService(World())
        service.lifecycle = Lifecycle(frozenset({"scheduler"}))  # still loading
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for name in ("a", "b"):
                await client.get(f"/v1/models/{name}")
                await client.request(f"X{name}", f"/{name}")
            await client.get("/v1/completions")
            await client.post("/v1/completions", json={})
            answer = await client.get("/metrics")
        assert answer.headers["content-type"] == CONTENT_TYPE_PLAIN_0_0_4
        return values(parse_text(answer.text))

    found = asyncio.run(main())
    http = {n: v for n, v in found.items() if n.startswith("minisgl_http_requests_total")}
    assert http == {
        "minisgl_http_requests_total{code=404,method=GET,route=/v1/models/{model_id:path}}": 2,
        "minisgl_http_requests_total{code=404,method=other,route=other}": 2,
        "minisgl_http_requests_total{code=405,method=GET,route=/v1/completions}": 1,
        "minisgl_http_requests_total{code=503,method=POST,route=/v1/completions}": 1,
    }
    assert found["minisgl_http_requests_in_flight{}"] == 0
    assert found["minisgl_requests_rejected_total{model_name=m,reason=loading}"] == 1


def test_a_request_that_is_refused_before_routing_counts_under_its_route() -> None:
    """A dashboard of 401 and 415 by route once showed them as `other`."""

    async def main() -> dict[str, float]:
        service = FakeService(
            World(), config=msgspec.structs.replace(KEYED, allowed_origins=("*",))
        )
        transport = httpx.ASGITransport(build_app(service))
        key = {"authorization": "Bearer sesame"}
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post("/v1/completions", json={})
            await client.get("/v1/models/org/m")
            await client.post("/v1/completions", content=b"x", headers=key)
            await client.options("/v1/completions", headers=preflight)
            await client.get("/nowhere")
            await client.get("/livez%0A", headers=key)
            answer = await client.get("/metrics")
        return values(parse_text(answer.text))

    found = asyncio.run(main())
    http = {n: v for n, v in found.items() if n.startswith("minisgl_http_requests_total")}
    assert http == {
        "minisgl_http_requests_total{code=200,method=OPTIONS,route=/v1/completions}": 1,
        "minisgl_http_requests_total{code=401,method=GET,route=/v1/models/{model_id:path}}": 1,
        "minisgl_http_requests_total{code=401,method=GET,route=other}": 1,
        "minisgl_http_requests_total{code=401,method=POST,route=/v1/completions}": 1,
        "minisgl_http_requests_total{code=404,method=GET,route=other}": 1,
        "minisgl_http_requests_total{code=415,method=POST,route=/v1/completions}": 1,
    }


def test_a_server_without_an_engine_exports_no_metric_of_an_engine() -> None:
    """A sum over all scraped pods, such as sum(minisgl_ready), once counted it as an engine."""
    metrics = Metrics("m", render_only=True)
    metrics.on_http("/tokenize", "POST", 200)
    names = {name.partition("{")[0].removesuffix("_total") for name in scraped(metrics)}
    assert names == {
        "minisgl_build_info",
        "minisgl_draining",
        "minisgl_http_requests",
        "minisgl_http_requests_in_flight",
        "minisgl_image_decode_seconds",
        "minisgl_images",
        "minisgl_images_refused",
        "minisgl_limits_exceeded",
        "minisgl_render_ready",
        "minisgl_startup_seconds",
        "process_start_time_seconds",
    }
    assert scraped(metrics)["minisgl_render_ready{}"] == 1
    assert "minisgl_render_ready{}" not in scraped(Metrics("m"))
