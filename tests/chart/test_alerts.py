"""Each alert fires and stays silent on prepared series, as Prometheus' promtool evaluates it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.chart.helm import pick
from tests.patience import patience

POD = 'namespace="llm",pod="minisgl-6f7d-x2b4z"'
RENDER_POD = 'namespace="llm",pod="minisgl-render-6f7d-x2b4z"'
OTHER = 'namespace="llm",pod="chat-minisgl-6f7d-x2b4z"'  # a pod of another release
pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: apt-get install prometheus"
)


class Case(NamedTuple):
    """Series with a sample for each interval, and whether the alert fires at time `at`."""

    alert: str
    fires: bool
    at: str
    series: dict[str, str]
    interval: str = "1m"


def gauge(name: str, values: str, labels: str = POD) -> dict[str, str]:
    return {f"{name}{{{labels}}}": values}


def histogram(name: str, le: str) -> dict[str, str]:
    """A histogram whose samples are all in the bucket `le`."""
    borders = ("0.01", "0.1", "1.0", "2.5", "5.0", "+Inf")
    first = borders.index(le)
    return {
        f'{name}_bucket{{{POD},le="{border}"}}': "0+60x60" if place >= first else "0x60"
        for place, border in enumerate(borders)
    }


def outcomes(errors: int, stops: int) -> dict[str, str]:
    return {
        f'minisgl_requests_total{{{POD},outcome="error"}}': f"0+{errors}x60",
        f'minisgl_requests_total{{{POD},outcome="stop"}}': f"0+{stops}x60",
    }


def stall(running: str, last_step_s: str) -> dict[str, str]:
    return {
        **gauge("minisgl_requests_running", running),
        **gauge("minisgl_requests_waiting", "0x60"),
        **gauge("minisgl_scheduler_last_step_timestamp_seconds", last_step_s),
    }


def memory(ratio: str, preemptions: str) -> dict[str, str]:
    return {
        **gauge("minisgl_kv_cache_usage_ratio", f"{ratio}x60"),
        **gauge("minisgl_preemptions_total", preemptions),
    }


RENDER_READY = "minisgl_render_ready"
READY, STARTS = "minisgl_ready", "process_start_time_seconds"
REJECTED, FINITE = "minisgl_requests_rejected_total", "minisgl_nonfinite_rows_total"
TTFT, ITL = "minisgl_time_to_first_token_seconds", "minisgl_inter_token_latency_seconds"
FULL = f'{POD},reason="queue_full"'
# A crash loop: three minutes of loading, a crash, five minutes of back-off.
CRASH_LOOP = gauge(READY, " ".join(["0x11 stale _x19"] * 4))
# The last step ends at 120 s. --step-timeout ends the server before the sample at 195 s.
ENDED_BY_TIMEOUT = stall("3x12 stale 0x60", "0+15x8 120x3 stale 240+15x60")
# Idle for five minutes. One scrape happens during the first step after that.
FIRST_STEP_AFTER_IDLE_TIME = stall("0x19 1 0x20", "0x20 310+15x20")

CASES = [
    Case("MinisglNoReadyPod", True, "10m", gauge(READY, "0x60")),
    Case("MinisglNoReadyPod", True, "10m", gauge(READY, "1x60", OTHER)),
    Case("MinisglNoReadyPod", False, "4m", gauge(READY, "0x60")),
    Case("MinisglNoReadyPod", False, "10m", gauge(READY, "1x60")),
    Case("MinisglNoReadyPod", True, "30m", CRASH_LOOP, "15s"),
    Case("MinisglNoReadyRenderPod", True, "10m", gauge(RENDER_READY, "1x60")),
    Case("MinisglNoReadyRenderPod", True, "10m", gauge(RENDER_READY, "0x60", RENDER_POD)),
    Case("MinisglNoReadyRenderPod", False, "10m", gauge(RENDER_READY, "1x60", RENDER_POD)),
    Case("MinisglRestarting", True, "30m", gauge(STARTS, "1x8 2x8 3x8 4x30")),
    Case("MinisglRestarting", False, "30m", gauge(STARTS, "1x8 2x50")),
    Case("MinisglSchedulerStalled", True, "5m", stall("3x60", "60x60")),
    Case("MinisglSchedulerStalled", False, "5m", stall("3x60", "0+60x60")),
    Case("MinisglSchedulerStalled", False, "5m", stall("0x60", "60x60")),
    Case("MinisglSchedulerStalled", True, "5m", ENDED_BY_TIMEOUT, "15s"),
    Case("MinisglSchedulerStalled", False, "5m", FIRST_STEP_AFTER_IDLE_TIME, "15s"),
    Case("MinisglErrors", True, "20m", outcomes(errors=10, stops=90)),
    Case("MinisglErrors", False, "20m", outcomes(errors=1, stops=99)),
    Case("MinisglErrors", False, "20m", outcomes(errors=0, stops=0)),
    Case("MinisglRejecting", True, "20m", gauge(REJECTED, "0+5x60", FULL)),
    Case("MinisglRejecting", False, "20m", gauge(REJECTED, "7x60", FULL)),
    Case("MinisglRejecting", False, "20m", gauge(REJECTED, "0+5x60", f'{POD},reason="draining"')),
    Case("MinisglQueueGrowing", True, "20m", gauge("minisgl_requests_waiting", "40x60")),
    Case("MinisglQueueGrowing", False, "20m", gauge("minisgl_requests_waiting", "40x5 0x60")),
    Case("MinisglSlowFirstToken", True, "30m", histogram(TTFT, "5.0")),
    Case("MinisglSlowFirstToken", False, "30m", histogram(TTFT, "1.0")),
    Case("MinisglSlowTokens", True, "30m", histogram(ITL, "1.0")),
    Case("MinisglSlowTokens", False, "30m", histogram(ITL, "0.01")),
    Case("MinisglKVCacheFull", True, "30m", memory("0.99", "0+1x60")),
    Case("MinisglKVCacheFull", False, "30m", memory("0.99", "5x60")),
    Case("MinisglKVCacheFull", False, "30m", memory("0.60", "0+1x60")),
    Case("MinisglNonFinite", True, "20m", gauge(FINITE, "0x12 3x60")),
    Case("MinisglNonFinite", False, "40m", gauge(FINITE, "0x12 3x60")),
]


@pytest.fixture(scope="module")
def rules(render, tmp_path_factory) -> Path:
    """A file with the rendered rules, as the Prometheus operator writes it."""
    values = {"prometheusRule": {"enabled": True}, "render": {"enabled": True}}
    rule = pick(render(values), "PrometheusRule")
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    return path


def promtool(*words: str) -> tuple[int, str]:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=patience())
    return done.returncode, done.stdout + done.stderr


def alerts_of(rules: Path) -> dict[str, Any]:
    listed = yaml.safe_load(rules.read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule for rule in listed}


def test_promtool_accepts_the_rules(rules):
    code, out = promtool("check", "rules", str(rules))
    assert code == 0, out
    assert f"{len(alerts_of(rules))} rules found" in out


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.alert}-{'fires' if c.fires else 'silent'}"
)
def test_alert_fires_or_stays_silent(rules, tmp_path, case):
    """Queries ALERTS, so that the test need not repeat labels and annotations.

    promtool evaluates the rule of this alert alone: all rules take five times the CPU time.
    """
    (group,) = yaml.safe_load(rules.read_text())["groups"]
    group["rules"] = [rule for rule in group["rules"] if rule["alert"] == case.alert]
    alone = tmp_path / "rule.yaml"
    alone.write_text(yaml.safe_dump({"groups": [group]}))
    unit = {
        "rule_files": [str(alone)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": case.interval,
                "input_series": [
                    {"series": name, "values": values} for name, values in case.series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})',
                        "eval_time": case.at,
                        "exp_samples": [{"value": 1}] if case.fires else [],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump(unit))
    code, out = promtool("test", "rules", str(path))
    assert code == 0, out


def test_every_alert_has_the_namespace_label(rules):
    """Releases of one name differ only in the namespace, and Alertmanager routes by labels."""
    assert {rule["labels"]["namespace"] for rule in alerts_of(rules).values()} == {"llm"}


def test_every_alert_has_a_firing_and_a_silent_case(rules):
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == alerts_of(rules).keys()
