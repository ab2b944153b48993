"""Generates values.schema.json from values.yaml.

Types come from the defaults and descriptions from the `# --` comments. RULES contains the rest:
bounds, allowed words, and the form of list items.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

__all__ = [
    "NULLABLE",
    "OPEN",
    "RULES",
    "documented_keys",
    "make_schema",
    "undocumented",
    "write_schema",
]

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
_DRAFT = "http://json-schema.org/draft-07/schema#"

_POSITIVE: Json = {"type": "integer", "minimum": 1}
_SECONDS: Json = {"type": "integer", "minimum": 0}
_QUANTITY: Json = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([EPTGMK]i|[EPTGMk])?$"}
_COUNT_OR_SHARE: Json = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "^[0-9]{1,3}%$"},
    ]
}
_DURATION: Json = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
_DURATION_OR_EMPTY: Json = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))*$"}
_STRING: Json = {"type": "string"}
# `--set` passes a fraction as a string. The templates check the bounds of both spellings.
_FRACTION: Json = {
    "type": ["number", "string"],
    "pattern": r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$",
}
_PATH: Json = {"type": "string", "pattern": "^/"}


def _list_of(**properties: Json) -> Json:
    item = {"type": "object", "required": ["name"], "properties": {"name": _STRING, **properties}}
    return {"type": "array", "items": item}


_NAMED: Json = _list_of()
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_STRINGS: Json = {"type": "array", "items": {"type": "string", "minLength": 1}}
_MAP: Json = {"type": "object", "additionalProperties": {"type": "string"}}


def _or_null(rule: Json) -> Json:
    if "enum" in rule:
        return {"enum": [*rule["enum"], None]}
    if "type" in rule:
        return {**rule, "type": [rule["type"], "null"]}
    return {"anyOf": [*rule["anyOf"], {"type": "null"}]}


def _as_flag(name: str) -> Json:
    """The type and the bounds, or the words, of the server's own flag."""
    sections = tomllib.loads((ROOT / "minisgl" / "settings" / "flags.toml").read_text()).values()
    flags = {
        one: flag
        for section in sections
        for names, flag in section.items()
        for one in names.split()
    }
    flag = flags[name]
    if "choices" in flag:
        return {"enum": flag["choices"]}
    assert flag["type"] == "int", f"{name} is not an integer flag: its value is a _FRACTION"
    highest = {"maximum": flag["high"]} if "high" in flag else {}
    return {"type": "integer", "minimum": flag["low"], **highest}


# Values that are Kubernetes objects. The API server checks their fields.
OPEN = (
    "resources",
    "render.resources",
    "podSecurityContext",
    "securityContext",
    "affinity",
    "tests.resources",
)
# Values with a default that may be set to null. The schema refuses null for all other values with a
# default: Helm deletes a value that is null, and the templates would print 0 or nothing.
NULLABLE = (*OPEN, "podDisruptionBudget.maxUnavailable", "tolerations")

RULES: dict[str, Json] = {
    "auth.cacheIsolation": _as_flag("--cache-isolation"),
    "autoscaling.maxReplicas": _POSITIVE,
    "autoscaling.minReplicas": _POSITIVE,
    "autoscaling.scaleDownWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
    "autoscaling.scaleUpWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
    "autoscaling.targetRunning": _POSITIVE,
    "autoscaling.targetWaiting": _POSITIVE,
    "autoscaling.keda.pollingIntervalSeconds": _POSITIVE,
    "cache.accessModes": {
        "type": "array",
        "minItems": 1,
        "items": {"enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]},
    },
    "cache.size": _QUANTITY,
    "dashboards.labelValue": _STRING,
    "drain.graceSeconds": _SECONDS,
    "drain.preStopSleepSeconds": _SECONDS,
    "drain.teardownSeconds": {"type": "integer", "minimum": 18},
    "drain.timeoutSeconds": _POSITIVE,
    # `--set extraArgs[1]=5` passes a number.
    "extraArgs": {"type": "array", "items": {"type": ["string", "number"], "minLength": 1}},
    "extraContainers": _NAMED,
    "extraEnv": _list_of(value=_STRING),
    "extraEnvFrom": _OBJECTS,
    "extraObjects": _OBJECTS,
    "extraVolumeMounts": _NAMED,
    "extraVolumes": _NAMED,
    "gpu.count": _or_null(_POSITIVE),
    "gpu.resourceName": _STRING,
    "hostCache.sizeGB": {"type": "integer", "minimum": 0},
    "httpRoute.hostnames": _STRINGS,
    "httpRoute.parentRefs": _NAMED,
    "httpRoute.path": _PATH,
    "httpRoute.requestTimeout": _DURATION,
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": _NAMED,
    "inferencePool.endpointPicker.failureMode": {"enum": ["FailOpen", "FailClose"]},
    "inferencePool.endpointPicker.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "ingress.hosts": _STRINGS,
    "ingress.path": _PATH,
    "ingress.tls": _OBJECTS,
    "initContainers": _NAMED,
    "liveness.failureThreshold": _POSITIVE,
    "liveness.periodSeconds": _POSITIVE,
    "liveness.timeoutSeconds": _POSITIVE,
    "metrics.podMonitor.interval": _DURATION,
    "metrics.podMonitor.metricRelabelings": _OBJECTS,
    "metrics.podMonitor.relabelings": _OBJECTS,
    "metrics.podMonitor.scrapeTimeout": _DURATION_OR_EMPTY,
    "metrics.serviceMonitor.interval": _DURATION,
    "metrics.serviceMonitor.metricRelabelings": _OBJECTS,
    "metrics.serviceMonitor.relabelings": _OBJECTS,
    "metrics.serviceMonitor.scrapeTimeout": _DURATION_OR_EMPTY,
    "minReadySeconds": _SECONDS,
    "model.servedNames": _STRINGS,
    "networkPolicy.extraEgress": _OBJECTS,
    "networkPolicy.from": _OBJECTS,
    "podDisruptionBudget.maxUnavailable": _or_null(_COUNT_OR_SHARE),
    "podDisruptionBudget.minAvailable": _or_null(_COUNT_OR_SHARE),
    "podDisruptionBudget.unhealthyPodEvictionPolicy": {"enum": ["AlwaysAllow", "IfHealthyBudget"]},
    "prometheusRule.errorRatio": _FRACTION,
    "prometheusRule.itlSeconds": _FRACTION,
    "prometheusRule.ttftSeconds": _FRACTION,
    "prometheusRule.waiting": _POSITIVE,
    "readiness.failureThreshold": _POSITIVE,
    "readiness.periodSeconds": _POSITIVE,
    "readiness.timeoutSeconds": _POSITIVE,
    "replicas": {"type": "integer", "minimum": 0},
    "resourceClaims": _NAMED,
    "revisionHistoryLimit": {"type": "integer", "minimum": 0},
    "server.allowedOrigins": {
        "type": "array",
        "items": {"type": "string", "pattern": r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+)$"},
    },
    "server.kvCacheDtype": _as_flag("--kv-cache-dtype"),
    "server.logLevel": _as_flag("--log-level"),
    "server.maxQueuedRequests": _as_flag("--max-queued-requests"),
    "server.maxRunningRequests": _as_flag("--max-running-requests"),
    "server.maxSeqLen": _or_null(_as_flag("--max-seq-len-override")),
    "server.memoryRatio": _FRACTION,
    "server.quantization": _or_null(_as_flag("--quantization")),
    "server.speculative": _or_null(_as_flag("--speculative")),
    "render.replicas": {"type": "integer", "minimum": 0},
    "render.scheduling": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "affinity": {"type": "object"},
            "nodeSelector": _MAP,
            "priorityClassName": _STRING,
            "schedulerName": _STRING,
            "tolerations": _OBJECTS,
            "topologySpreadConstraints": _OBJECTS,
        },
    },
    "server.tokenizers": _as_flag("--num-tokenizer"),
    "server.toolFormat": _as_flag("--tool-format"),
    "service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "shm.size": _QUANTITY,
    "startup.budgetSeconds": _POSITIVE,
    "startup.periodSeconds": _POSITIVE,
    "strategy.maxSurge": _COUNT_OR_SHARE,
    "strategy.maxUnavailable": _COUNT_OR_SHARE,
    "strategy.type": {"enum": ["RollingUpdate", "Recreate"]},
    "tensorParallelSize": _as_flag("--tensor-parallel-size"),
    "terminationGracePeriodSeconds": _or_null(_POSITIVE),
    "tmp.size": _QUANTITY,
    "tolerations": _OBJECTS,
    "topologySpreadConstraints": _OBJECTS,
}


class _Key(NamedTuple):
    path: str
    value: yaml.Node
    comment: str  # the "# --" text above the key, empty if there is none


def _walk(node: yaml.Node, lines: list[str], prefix: str = "") -> Iterator[_Key]:
    """Yields every key, parents first, except the keys inside OPEN objects."""
    assert isinstance(node, yaml.MappingNode), f"values.yaml: {prefix} is not a map"
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        above = lines[key.start_mark.line - 1].strip() if key.start_mark.line else ""
        match = re.match(r"# -- (.+)", above)
        yield _Key(path, value, match.group(1) if match else "")
        if isinstance(value, yaml.MappingNode) and value.value and path not in OPEN:
            yield from _walk(value, lines, f"{path}.")


def _keys(values: str) -> list[_Key]:
    root = yaml.compose(values, Loader=yaml.SafeLoader)
    assert root is not None, "values.yaml is empty"
    return list(_walk(root, values.splitlines()))


def _is_group(key: _Key) -> bool:
    mapping = isinstance(key.value, yaml.MappingNode)
    return mapping and bool(key.value.value) and key.path not in OPEN


def documented_keys(values: str) -> list[str]:
    """The dotted paths of all values, without groups."""
    return [key.path for key in _keys(values) if not _is_group(key)]


def undocumented(values: str) -> list[str]:
    """The paths of values without a `# --` comment."""
    return [key.path for key in _keys(values) if not _is_group(key) and not key.comment]


def _default(key: _Key) -> Any:
    return yaml.safe_load(yaml.serialize(key.value))


def _rule(key: _Key) -> Json:
    if key.path in RULES:
        return RULES[key.path]
    if key.path in OPEN:
        return {"type": "object"}
    match _default(key):
        case bool():
            return {"type": "boolean"}
        case "":
            return _STRING
        case str():
            return {**_STRING, "minLength": 1}
        case {}:
            return _MAP
    raise ValueError(
        f"values.yaml: the default of {key.path} does not show its type: add it to RULES"
    )


def make_schema(values: str) -> Json:
    """The whole schema. Raises ValueError for a value whose type is unknown."""
    root: Json = {"$schema": _DRAFT, **_group()}
    root["properties"]["global"] = {
        "type": "object",
        "description": "Values of the parent chart, if this is a subchart.",
    }
    for key in _keys(values):
        *parents, name = key.path.split(".")
        place = root
        for parent in parents:
            place = place["properties"][parent]
        rule = _group() if _is_group(key) else {"description": key.comment, **_rule(key)}
        place["properties"][name] = rule
        if key.path not in NULLABLE and _default(key) not in (None, "", [], {}):
            place.setdefault("required", []).append(name)
    unused = RULES.keys() - set(documented_keys(values))
    if unused:
        raise ValueError(f"RULES contains values that values.yaml lacks: {sorted(unused)}")
    return root


def _group() -> Json:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def write_schema() -> dict[Path, str]:
    """The path and the text of the schema file, with one value per line."""
    schema = make_schema((CHART / "values.yaml").read_text())
    return {CHART / "values.schema.json": _dump(schema) + "\n"}


def _dump(schema: Json, indent: str = "") -> str:
    """JSON with one line per value, so that a changed value changes one line."""
    if "properties" not in schema or "additionalProperties" not in schema:
        return json.dumps(schema)
    head = {name: part for name, part in schema.items() if name != "properties"}
    inner = [
        f"{indent}  {json.dumps(name)}: {_dump(rule, indent + '  ')}"
        for name, rule in schema["properties"].items()
    ]
    return json.dumps(head)[:-1] + ', "properties": {\n' + ",\n".join(inner) + f"\n{indent}}}}}"
