"""Builders for the panels of the dashboards, with one function for each kind of panel.

The functions take PromQL expressions with placeholders. Each query selects only the series that the
variables at the top of the dashboard choose.
"""

from collections.abc import Mapping

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import heatmap as heatmap_builders
from grafana_foundation_sdk.builders import stat as stat_builders
from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common, dashboard, heatmap, prometheus

__all__ = ["DATASOURCE", "Panel", "Series", "graph", "heat", "number", "percentiles"]

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ENGINE = 'namespace=~"$namespace",pod=~"$pod",model_name=~"$model"'
_PROCESS = 'namespace=~"$namespace",pod=~"$pod"'  # metrics of the process have no model label

Series = Mapping[str, str]  # PromQL by legend; _fill replaces the placeholders
Panel = timeseries.Panel | heatmap_builders.Panel | stat_builders.Panel


def _fill(expr: str) -> str:
    """Replaces the placeholders {m} or {m,...} (model), {p} (process) and [r] (rate interval)."""
    filled = expr.replace("{m", "{" + _ENGINE).replace("{p", "{" + _PROCESS)
    return filled.replace("[r]", "[$__rate_interval]")


def _query(expr: str, legend: str, ref: str) -> Dataquery:
    return (
        Dataquery()
        .datasource(DATASOURCE)
        .expr(_fill(expr))
        .legend_format(legend)
        .ref_id(ref)
        .range()
    )


def graph(
    title: str, series: Series, unit: str, about: str, span: int = 8, stacked: bool = False
) -> timeseries.Panel:
    """A panel with lines over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .min(0)
        .show_points(common.VisibilityMode.NEVER)
        .fill_opacity(30 if stacked else 8)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    for number_, (legend, expr) in enumerate(series.items()):
        panel = panel.with_target(_query(expr, legend, chr(ord("A") + number_)))
    return panel


def percentiles(title: str, metric: str, about: str, span: int = 8) -> timeseries.Panel:
    """A panel with p50, p95 and p99 of a histogram in seconds, over all chosen pods."""
    rate = "sum by (le) (rate(" + metric + "_bucket{m}[r]))"
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    series = {name: f"histogram_quantile({share}, {rate})" for name, share in shares.items()}
    return graph(title, series, "s", about, span)


def heat(
    title: str, metric: str, about: str, unit: str = "s", span: int = 8
) -> heatmap_builders.Panel:
    """A heat map of a histogram: samples per bucket over time."""
    expr = "sum by (le) (increase(" + metric + "_bucket{m}[r]))"
    query = _query(expr, "{{le}}", "A")
    return (
        heatmap_builders.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .calculate(False)
        .y_axis(heatmap_builders.YAxisConfig().unit(unit))
        .color(
            heatmap_builders.HeatmapColorOptions()
            .mode(heatmap.HeatmapColorMode.SCHEME)
            .scheme("Spectral")
            .steps(64)
        )
        .with_target(query.format(prometheus.PromQueryFormat.HEATMAP))
    )


def number(title: str, expr: str, unit: str, about: str, span: int = 4) -> stat_builders.Panel:
    """A panel with the last value as a number, over a line of its recent values."""
    return (
        stat_builders.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_query(expr, title, "A"))
    )
