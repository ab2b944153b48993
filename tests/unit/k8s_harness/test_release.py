"""Endpoints of a Service."""

from k8s_harness.release import ready_endpoints


def test_only_ready_endpoints_receive_connections() -> None:
    def endpoint(name: str, ready: bool) -> dict[str, object]:
        return {"targetRef": {"name": name}, "conditions": {"ready": ready, "serving": True}}

    slices = [
        {"endpoints": [endpoint("b", True), endpoint("going", False)]},
        {"endpoints": None},
        {"endpoints": [endpoint("a", True), endpoint("b", True)]},
    ]
    assert ready_endpoints(slices) == ["a", "b"]
