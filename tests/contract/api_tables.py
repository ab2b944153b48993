"""The tables of docs/api.md, generated from the code.

`python -m tests.contract.api_tables` writes them into the page.
"""

import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from minisgl.core import EngineConfig, SchedulerConfig
from minisgl.protocol.messages_api import MessagesBody
from minisgl.protocol.requests import (
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    PARAMETERS,
    KnownParameters,
    RequestBody,
    known_parameters,
)
from minisgl.protocol.responses_api import ResponsesBody
from minisgl.request.convert import RequestConverter
from minisgl.server.errors import status_table
from minisgl.server.openapi import component_schemas
from minisgl.settings import ServerConfig
from minisgl.settings.command_line import build_parser

__all__ = ["PAGE", "with_tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
PACKAGE = Path(__file__).resolve().parents[2] / "minisgl"
METRICS = tomllib.loads((PACKAGE / "server" / "observe" / "metrics.toml").read_text())
LIMIT_NAMES = METRICS["counter"]["limits_exceeded_total"]["labels"]["limit"]
CONFIG = ServerConfig(
    engine=EngineConfig(model_path="."), scheduler=SchedulerConfig(), served_names=()
)
SCHEMAS = component_schemas(RequestConverter(CONFIG))
ROUTES = {CHAT: "chat", COMPLETIONS: "completions", GENERATE: "/generate"}
FIXED_LIMITS = (
    "| none | 100 | `max_headers` | Headers of one request. More get 431. |",
    "| none | 256 | `max_small_chunks` | Chunks that a body may have beyond one for each 64 "
    "bytes. More get 400. |",
    "| none | 65,536 and 524,288 | `max_body_values` | Lists, objects and fields of one body, and "
    "all values of one body. |",
    "| none | 16 | `max_stop_strings` | Stop strings of one request. |",
    "| none | 256 chars | `max_stop_chars` | Characters of one stop string. |",
    "| none | 128 | `max_stop_token_ids` | Stop token ids of one request. |",
    "| none | 8,388,608 chars | `max_template_chars` | Text that a chat may render to. |",
    "| none | 262,144 chars | `max_grammar_chars` | Text of a grammar, and of a schema without "
    "titles and descriptions. With them 1,048,576. |",
    "| none | 64 | `max_grammar_depth` | Nested objects and lists of a schema. |",
    "| none | 10,000 | `max_enum_entries` | Entries of all enums of a schema. |",
    "| none | 200 | `max_image_aspect` | Ratio of the longer to the shorter side of an image. |",
    "| none | 10,000 | `max_image_frames` | Frames of an image (GIF: of 65,536 blocks). The first "
    "one is read. |",
    "| none | 1 GiB | `max_image_memory` | Address space for decoding one image. |",
    "| none | 0.09 s and 512 MiB | `max_grammar_seconds` | CPU time and memory of checking and "
    "compiling a grammar or the tools of a request. |",
)


def with_tables(page: str) -> str:
    """The page with new contents between each `<!-- table: NAME -->` and `<!-- end -->`."""
    tables = {
        "parameters": parameters,
        "refused": refused,
        "responses": partial(api_parameters, ResponsesBody),
        "messages": partial(api_parameters, MessagesBody),
        "limits": limits,
        "errors": errors,
    }

    def replace(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


def parameters() -> str:
    """One row for each parameter, or several where the routes take different values."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for route, struct in BODIES.items():
        for name in struct.__struct_fields__:
            schema = SCHEMAS[struct.__name__]["properties"][name]
            row = name, values(schema), default(schema), meaning(schema)
            rows.setdefault(row, []).append(ROUTES[route])
    lines = ["| parameter | routes | values | default | meaning |", "|---|---|---|---|---|"]
    for (name, *cells), routes in sorted(rows.items()):
        shown = "all" if len(routes) == len(ROUTES) else ", ".join(routes)
        lines.append(f"| `{name}` | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def api_parameters(struct: type[RequestBody]) -> str:
    """The fields of the body of another API, and the parameters that are no fields."""
    rows = ["| parameter | values | default | meaning |", "|---|---|---|---|"]
    for name in struct.__struct_fields__:
        schema = SCHEMAS[struct.__name__]["properties"][name]
        rows.append(f"| `{name}` | {values(schema)} | {default(schema)} | {meaning(schema)} |")
    return "\n".join(rows) + _others(known_parameters(struct))


def default(schema: dict[str, Any]) -> str:
    """The default as JSON, or nothing for null and empty values."""
    found = [one.get("default") for one in [schema, *schema.get("anyOf", ())]]
    return next((f"`{json.dumps(one)}`" for one in found if one or one is False), "")


def meaning(schema: dict[str, Any]) -> str:
    """The description of a schema, or of the struct that it names."""
    for one in [schema, *schema.get("anyOf", ())]:
        target = SCHEMAS.get(one.get("$ref", "").rpartition("/")[2], {})
        if "description" in one or "description" in target:
            text = str(one.get("description") or target["description"])
            return text.split("\n")[0]
    raise AssertionError(f"every parameter has a description: {schema}")


def values(schema: dict[str, Any]) -> str:
    """The allowed values in a few words."""
    if "anyOf" in schema:
        arms = [values(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return ", or ".join(arms)
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        most = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
        items = values(schema["items"])
        return f"list{most}: ({items})" if "anyOf" in schema["items"] else f"list{most}: {items}"
    if kind == "object":
        names = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
        most = f" of up to {schema['maxProperties']}" if "maxProperties" in schema else ""
        return (
            f"object ({names})"
            if names
            else f"object{most}: {values(schema['additionalProperties'])}"
            if "additionalProperties" in schema
            else "object"
        )
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{kind} above {schema['exclusiveMinimum']} to {high}"
    if high is not None and abs(high) >= 2**31 - 1:
        high = None
        low = None if low is not None and low <= -(2**31) else low
    if low is not None or high is not None:
        return f"{kind} " + (f"{low} to {high}" if high is not None else f"from {low}")
    if "maxLength" in schema:
        return f"{kind} of up to {schema['maxLength']} characters"
    return str(kind)


def refused() -> str:
    rows = ["| parameter | accepted values |", "|---|---|"]
    for name, neutral in sorted(PARAMETERS.unsupported.items()):
        values = ", ".join(f"`{value!r}`" for value in neutral) or "absent or null"
        rows.append(f"| `{name}` | {values} |")
    return "\n".join(rows) + _ignored(PARAMETERS)


def _ignored(parameters: KnownParameters) -> str:
    ignored = ", ".join(f"`{name}`" for name in sorted(parameters.ignored))
    return f"\n\nAccepted and ignored, because they do not change the answer: {ignored}."


def _others(parameters: KnownParameters) -> str:
    """The parameters that are no fields, in two sentences."""
    neutral = {
        name: " or ".join(f"`{json.dumps(value)}`" for value in values)
        for name, values in sorted(parameters.unsupported.items())
    }
    refused = ", ".join(f"`{n}`{f' (except {v})' if v else ''}" for n, v in neutral.items())
    return f"{_ignored(parameters)}\n\nRefused: {refused}."


def limits() -> str:
    """One row for each limit, with its label in `minisgl_limits_exceeded_total`."""
    rows = ["| flag | default | value of `limit` | meaning |", "|---|---|---|---|"]
    actions = {o: a for a in build_parser()._actions for o in a.option_strings}
    flags = tomllib.loads((PACKAGE / "settings" / "flags.toml").read_text())["limits"]
    for names, flag in flags.items():
        name = names.split()[0]
        default, unit = actions[name].default, flag["unit"].lower()
        shown = "-" if default is None else f"{default:,} {unit}".removesuffix(" n")
        label = f"`{flag['to'].split('.')[1]}`"
        if name == "--max-choices":
            label += ", `max_n` (n), `max_prompts` (prompts)"
        rows.append(f"| `{name}` | {shown} | {label} | {flag['help']} |")
    text = "Tokens of prompt and answer together."
    rows.append(f"| `--max-seq-len-override` | the model's | `max_seq_len` | {text} |")
    rows += FIXED_LIMITS
    found = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert found == set(LIMIT_NAMES), "each limit has a row"
    return "\n".join(rows)


def errors() -> str:
    rows = ["| status | code | when |", "|---|---|---|"]
    return "\n".join(rows + [f"| {s} | `{c}` | {doc} |" for s, c, doc in status_table()])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
