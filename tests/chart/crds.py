"""Schemas of the custom resources that the chart makes, with only the fields that it uses.

No package contains these definitions, so they are written here from the documentation of each API.
They find a misspelt or misplaced field, but not a change of the API.
"""

from typing import Any

__all__ = ["SCHEMAS"]

Json = dict[str, Any]


def _object(required: str = "", **properties: Json) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: Json) -> Json:
    return {"type": "array", "minItems": 1, "items": items}


_STRING: Json = {"type": "string", "minLength": 1}
_INTEGER: Json = {"type": "integer"}
_PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
_ANY: Json = {"type": "object"}
_LABELS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = _object("matchLabels", matchLabels=_LABELS)
_IN = _object("key operator values", key=_STRING, operator={"const": "In"}, values=_list(_STRING))
_MONITORED = _object("matchLabels", matchLabels=_LABELS, matchExpressions=_list(_IN))
_NAME: Json = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_DURATION: Json = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}


def _custom(api: str, kind: str, spec: Json) -> Json:
    metadata = _object(
        "name namespace labels", name=_NAME, namespace=_NAME, labels=_LABELS, annotations=_LABELS
    )
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_ENDPOINT = _object(
    "port path interval",
    port=_STRING,
    path=_STRING,
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    honorLabels={"type": "boolean"},
    relabelings=_list(_ANY),
    metricRelabelings=_list(_ANY),
)
_RULE = _object(
    "alert expr labels annotations",
    alert={"type": "string", "pattern": "^Minisgl[A-Za-z]+$"},
    expr=_STRING,
    labels=_LABELS,
    annotations=_object(
        "summary runbook_url", summary=_STRING, description=_STRING, runbook_url=_STRING
    ),
    **{"for": _DURATION, "keep_firing_for": _DURATION},
)
_TRIGGER = _object(
    "type metadata metricType",
    type={"const": "prometheus"},
    metricType={"const": "AverageValue"},
    metadata=_object(
        "serverAddress query threshold",
        serverAddress=_STRING,
        query=_STRING,
        threshold={"type": "string", "pattern": "^[0-9.]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
    authenticationRef=_object("name", name=_STRING),
)
_BACKEND = _object("name", name=_NAME, port=_PORT, group=_STRING, kind=_STRING)

SCHEMAS: dict[tuple[str, str], Json] = {
    (api, kind): _custom(api, kind, spec)
    for api, kind, spec in (
        (
            "monitoring.coreos.com/v1",
            "PodMonitor",
            _object(
                "selector podMetricsEndpoints",
                selector=_MONITORED,
                podMetricsEndpoints=_list(_ENDPOINT),
            ),
        ),
        (
            "monitoring.coreos.com/v1",
            "ServiceMonitor",
            _object("selector endpoints", selector=_MONITORED, endpoints=_list(_ENDPOINT)),
        ),
        (
            "monitoring.coreos.com/v1",
            "PrometheusRule",
            _object(
                "groups",
                groups=_list(
                    _object("name rules", name=_STRING, interval=_DURATION, rules=_list(_RULE))
                ),
            ),
        ),
        (
            "keda.sh/v1alpha1",
            "ScaledObject",
            _object(
                "scaleTargetRef triggers minReplicaCount maxReplicaCount",
                scaleTargetRef=_object("name", name=_NAME),
                minReplicaCount=_INTEGER,
                maxReplicaCount=_INTEGER,
                pollingInterval=_INTEGER,
                advanced=_object(
                    "horizontalPodAutoscalerConfig",
                    horizontalPodAutoscalerConfig=_object("behavior", behavior=_ANY),
                ),
                triggers=_list(_TRIGGER),
            ),
        ),
        (
            "gateway.networking.k8s.io/v1",
            "HTTPRoute",
            _object(
                "parentRefs rules",
                parentRefs=_list(_object("name", name=_NAME, namespace=_NAME)),
                hostnames=_list(_STRING),
                rules=_list(
                    _object(
                        "matches timeouts backendRefs",
                        matches=_list(
                            _object("path", path=_object("type value", type=_STRING, value=_STRING))
                        ),
                        timeouts=_object("request", request=_DURATION),
                        backendRefs=_list(_BACKEND),
                    )
                ),
            ),
        ),
        (
            "inference.networking.k8s.io/v1",
            "InferencePool",
            _object(
                "selector targetPorts endpointPickerRef",
                selector=_SELECTOR,
                targetPorts=_list(_object("number", number=_PORT)),
                endpointPickerRef=_object(
                    "name port failureMode",
                    name=_NAME,
                    port=_object("number", number=_PORT),
                    failureMode={"enum": ["FailOpen", "FailClose"]},
                ),
            ),
        ),
    )
}
