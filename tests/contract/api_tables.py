"""The tables of docs/api.md as the code has them; `python -m tests.contract.api_tables` writes."""

import re
import tomllib
from pathlib import Path
from typing import Any

from minisgl.server import Limits
from minisgl.server.cli import build_parser
from minisgl.server.config import LIMIT_NAMES
from minisgl.server.errors import status_table
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE, HARMLESS, NOT_OFFERED, ParamTable

__all__ = ["PAGE", "with_tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
PACKAGE = Path(__file__).resolve().parents[2] / "minisgl"
TABLE = ParamTable(Limits())
FIXED_LIMITS = (
    "| `--max-choices` | | `max_n` | n of one request |",
    "| `--max-choices` | | `max_prompts` | prompts of one completions request |",
    "| none | 16 N | `max_stop_strings` | stop strings of one request |",
    "| none | 256 CHARS | `max_stop_chars` | characters of one stop string |",
    "| none | 128 N | `max_stop_token_ids` | stop token ids of one request |",
    "| none | 8,388,608 CHARS | `max_template_chars` | text that a chat may render to |",
)
ROUTES = {"chat": CHAT, "completions": COMPLETIONS, "generate": GENERATE}


def with_tables(page: str) -> str:
    """The page with each `<!-- table: NAME -->` ... `<!-- end -->` written anew."""
    tables = {"parameters": parameters, "refused": refused, "limits": limits, "errors": errors}

    def replace(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


def parameters() -> str:
    names = sorted({name for route in ROUTES.values() for name in TABLE.offered[route]})
    rows = ["| parameter | chat | completions | /generate |", "|---|---|---|---|"]
    for name in names:
        cells = []
        for route in ROUTES.values():
            check = TABLE.offered[route].get(name)
            cells.append("" if check is None else described(check.schema))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def described(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return ", or ".join(described(one) for one in schema["anyOf"])
    kind = schema.get("type", "any")
    if kind == "array":
        return (
            f"list of up to {schema.get('maxItems', 'the context')}: {described(schema['items'])}"
        )
    if kind == "object":
        names = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
        return f"object ({names})" if names else "object"
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
    rows = ["| parameter | taken only as |", "|---|---|"]
    for name, neutral in sorted(NOT_OFFERED.items()):
        values = ", ".join(f"`{value!r}`" for value in neutral) or "absent or null"
        rows.append(f"| `{name}` | {values} |")
    ignored = ", ".join(f"`{name}`" for name in sorted(HARMLESS))
    return "\n".join(rows) + f"\n\nIgnored, since they change no answer: {ignored}."


def limits() -> str:
    """Each row also says how `minisgl_limits_exceeded_total` calls it."""
    rows = ["| flag | default | metric | what |", "|---|---|---|---|"]
    actions = {o: a for a in build_parser()._actions for o in a.option_strings}
    flags = tomllib.loads((PACKAGE / "server" / "flags.toml").read_text())["limits"]
    for names, flag in flags.items():
        name = names.split()[0]
        default, unit = actions[name].default, flag["unit"]
        shown = "-" if default is None else f"{default:,} {unit}"
        rows.append(f"| `{name}` | {shown} | `{flag['to'].split('.')[1]}` | {flag['help']} |")
    what = "tokens of prompt and answer together"
    rows.append(f"| `--max-seq-len-override` | the model's TOKENS | `max_seq_len` | {what} |")
    rows += FIXED_LIMITS
    found = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert found == set(LIMIT_NAMES), "each limit has a row"
    return "\n".join(rows)


def errors() -> str:
    rows = ["| status | code | when |", "|---|---|---|"]
    return "\n".join(rows + [f"| {s} | `{c}` | {doc} |" for s, c, doc in status_table()])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
