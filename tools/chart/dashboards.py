"""Generates the Grafana dashboards of the chart: one about the service, one about the engine.

A test checks that the dashboards use only metrics of the table in docs/operations.md.
"""

import json
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from tools.chart import engine, service
from tools.chart.panels import DATASOURCE, Panel

__all__ = ["write_dashboards"]

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "dashboards"


def _variable(name: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(name)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(text="All", value="$__all"))
    )


def _new(title: str, uid: str, about: str) -> builders.Dashboard:
    """An empty dashboard with the variables that all queries use."""
    chosen = 'namespace=~"$namespace",model_name=~"$model"'
    return (
        builders.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["minisgl"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("minisgl")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["minisgl"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            builders.DatasourceVariable("datasource").label("data source").type("prometheus")
        )
        .with_variable(_variable("namespace", "label_values(minisgl_requests_running, namespace)"))
        .with_variable(
            _variable(
                "model",
                'label_values(minisgl_requests_running{namespace=~"$namespace"}, model_name)',
            )
        )
        .with_variable(_variable("pod", f"label_values(minisgl_requests_running{{{chosen}}}, pod)"))
    )


def _service_board() -> builders.Dashboard:
    board = _new(
        "minisgl / service",
        "minisgl-service",
        "Readiness, traffic, errors and latency of the service.",
    )
    _add(board, service.summary())
    _add(board.with_row(builders.Row("Traffic and errors")), service.traffic())
    return _add(board.with_row(builders.Row("Latency")), service.latency())


def _engine_board() -> builders.Dashboard:
    board = _new(
        "minisgl / engine",
        "minisgl-engine",
        "Batches, CUDA graphs, KV memory, prefix cache, grammars, drafts, images and start of the "
        "engine.",
    )
    _add(board.with_row(builders.Row("Batches")), engine.batches())
    _add(board.with_row(builders.Row("Memory and prefix cache")), engine.memory())
    _add(board.with_row(builders.Row("Structured output")), engine.structured())
    _add(board.with_row(builders.Row("Drafts")), engine.drafts())
    _add(board.with_row(builders.Row("Images")), engine.images())
    return _add(board.with_row(builders.Row("Health and start")), engine.health())


def _add(board: builders.Dashboard, panels: list[Panel]) -> builders.Dashboard:
    for panel in panels:
        board.with_panel(panel)
    return board


def write_dashboards() -> dict[Path, str]:
    """The path and the text of each dashboard file, with one panel per line."""
    boards = {"minisgl-service.json": _service_board(), "minisgl-engine.json": _engine_board()}
    return {FOLDER / name: _dump(board.build()) for name, board in boards.items()}


def _dump(board: dashboard.Dashboard) -> str:
    plain = json.loads(json.dumps(board, cls=JSONEncoder))
    for number_, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number_
    lines = []
    for key, value in sorted(plain.items()):
        if key == "panels":
            panels = ",\n    ".join(json.dumps(panel, sort_keys=True) for panel in value)
            lines.append(f'  "panels": [\n    {panels}\n  ]')
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
