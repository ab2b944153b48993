"""Every expression of the dashboards and autoscalers parses and finds data.

promtool evaluates the expressions on samples that are made from the metric table.
"""

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, pick
from tests.chart.table import Metric, metrics
from tests.patience import patience

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
POD = {"namespace": "llm", "pod": "minisgl-6f7d-x2b4z"}
# Values of labels. Labels that are not listed have one sample value.
VALUES = {
    "cuda_graph": ("true", "false"),
    "outcome": ("stop", "length", "abort", "error", "rejected"),
    "phase": ("prefill", "decode", "mixed"),
    "state": ("used", "evictable", "free"),
    "le": ("0.1", "1.0", "+Inf"),
}
VARIABLES = {"$__rate_interval": "5m", "$namespace": "llm", "$pod": ".*", "$model": ".*"}
pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: apt-get install prometheus"
)


def samples(metric: Metric) -> dict[str, str]:
    """Series of a metric in promtool's format. Counters grow."""
    found = {}
    for name in metric.series:
        labels = sorted(metric.labels | ({"le"} if name.endswith("_bucket") else set()))
        for choice in itertools.product(*(VALUES.get(label, ("x",)) for label in labels)):
            pairs = {**POD, **dict(zip(labels, choice, strict=True))}
            text = ",".join(f'{label}="{value}"' for label, value in pairs.items())
            found[f"{name}{{{text}}}"] = "1x30" if metric.type == "gauge" else "0+7x30"
    return found


def expressions_of(path: Path) -> list[str]:
    text = path.read_text()
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    panels = json.loads(text)["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def evaluate(expressions: list[str], folder: Path) -> str:
    """promtool's errors for expressions without a finite value. Empty: no errors."""
    series = {s: v for metric in metrics().values() for s, v in samples(metric).items()}
    finite = [f"count(({expr}) > -Inf < Inf) > bool 0" for expr in expressions]
    unit = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": [
                    {"expr": expr, "eval_time": "20m", "exp_samples": [{"value": 1}]}
                    for expr in finite
                ],
            }
        ],
    }
    path = folder / "unit.yaml"
    path.write_text(yaml.safe_dump(unit))
    command = ["promtool", "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience())
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_finds_data(path, tmp_path):
    assert evaluate(expressions_of(path), tmp_path) == ""


def test_autoscaler_finds_data(render, tmp_path):
    keda = {"enabled": True, "prometheusAddress": "http://p:9090"}
    triggers = pick(render({"autoscaling": {"keda": keda}}), "ScaledObject")["spec"]["triggers"]
    assert evaluate([trigger["metadata"]["query"] for trigger in triggers], tmp_path) == ""


@pytest.mark.parametrize("wrong", ["sum(minisgl_requests_queued)", "sum(", "0 / 0 * minisgl_ready"])
def test_the_check_finds_wrong_expressions(wrong, tmp_path):
    assert evaluate([wrong], tmp_path) != ""
