"""The HPA's arithmetic against cases of Kubernetes' own tests, and its windows and policies."""

from pathlib import Path

import pytest
import yaml

from minisgl.benchmark.fleet.autoscale import (
    POLICY_PERIOD_S,
    SYNC_S,
    TOLERANCE,
    Autoscaler,
    wanted_replicas,
)

_HELM = Path(__file__).parents[4] / "helm"


@pytest.mark.parametrize(
    ("values", "missing", "target", "current", "wanted"),
    [
        pytest.param([20, 10, 30], 0, 15, 3, 4, id="ScaleUpCM"),
        pytest.param([12, 12, 12, 12, 12], 0, 20, 5, 3, id="ScaleDownCM"),
        pytest.param([20, 21, 21], 0, 20, 3, 3, id="ToleranceCM"),
        pytest.param([200], 0, 100, 1, 2, id="twice the target doubles"),
        pytest.param([50, 50, 50, 50], 0, 100, 4, 2, id="half the target halves"),
        pytest.param([109, 109], 0, 100, 2, 2, id="just within the tolerance"),
        pytest.param([111, 111], 0, 100, 2, 3, id="just above the tolerance"),
        pytest.param([0, 0, 0], 0, 4, 3, 0, id="no load"),
        pytest.param([1900], 1, 1000, 2, 2, id="MissingMetricsNoChangeGt"),
        pytest.param([600], 1, 1000, 2, 2, id="MissingMetricsNoChangeLt"),
        pytest.param([8, 8], 1, 4, 3, 4, id="a pod that starts counts as idle when scaling up"),
        pytest.param([1, 1], 1, 4, 3, 2, id="a pod that starts counts as busy when scaling down"),
        pytest.param([9, 9, 9], 3, 4, 6, 7, id="few of the wanted pods are still missing"),
    ],
)
def test_the_number_of_pods_for_one_metric(
    values: list[float], missing: int, target: float, current: int, wanted: int
) -> None:
    assert wanted_replicas(values, missing, target, current) == wanted


def hold(rules: Autoscaler, from_s: float, until_s: float, current: int, waiting: float) -> int:
    """Sync every 15 s with `waiting` requests on each of the pods, all ready."""
    now_s = from_s
    while now_s < until_s:
        current = rules.desired(now_s, current, [0.0] * current, [waiting] * current, 0)
        now_s += SYNC_S
    return current


def test_the_larger_of_the_two_metrics_wins() -> None:
    rules = Autoscaler(1, 10, up_window_s=0.0)
    assert rules.desired(0.0, 2, [10.0, 10.0], [8.0, 8.0], 0) == 4
    rules = Autoscaler(1, 10, up_window_s=0.0)
    assert rules.desired(0.0, 2, [240.0, 240.0], [0.0, 0.0], 0) == 3


def test_pods_are_added_after_the_window_and_at_most_doubled_in_a_minute() -> None:
    rules = Autoscaler(1, 100)
    assert hold(rules, 0.0, 46.0, 2, waiting=40.0) == 2
    assert hold(rules, 60.0, 61.0, 2, waiting=40.0) == 4
    assert hold(rules, 75.0, 106.0, 4, waiting=40.0) == 4
    assert hold(rules, 120.0, 121.0, 4, waiting=40.0) == 8


def test_a_short_peak_adds_no_pod() -> None:
    rules = Autoscaler(1, 100)
    assert hold(rules, 0.0, 60.0, 2, waiting=40.0) == 2
    assert hold(rules, 60.0, 75.0, 2, waiting=4.0) == 2
    assert hold(rules, 75.0, 120.0, 2, waiting=40.0) == 2


def test_pods_are_removed_after_their_window_and_one_in_a_minute() -> None:
    rules = Autoscaler(1, 100)
    assert hold(rules, 0.0, 300.0, 5, waiting=0.0) == 5
    assert hold(rules, 300.0, 301.0, 5, waiting=0.0) == 4
    assert hold(rules, 315.0, 346.0, 4, waiting=0.0) == 4
    assert hold(rules, 360.0, 361.0, 4, waiting=0.0) == 3
    assert hold(rules, 375.0, 900.0, 3, waiting=0.0) == 1


def test_the_limits_hold() -> None:
    assert Autoscaler(1, 3, up_window_s=0.0).desired(0.0, 3, [0.0] * 3, [99.0] * 3, 0) == 3
    assert Autoscaler(2, 9, down_window_s=0.0).desired(0.0, 2, [0.0] * 2, [0.0] * 2, 0) == 2


def test_without_a_ready_pod_nothing_changes() -> None:
    assert Autoscaler(1, 9, up_window_s=0.0).desired(0.0, 3, [], [], 3) == 3


def test_the_rules_are_those_of_the_chart() -> None:
    values = yaml.safe_load((_HELM / "values.yaml").read_text())["autoscaling"]
    rules = Autoscaler()
    assert (rules.min_replicas, rules.max_replicas) == (
        values["minReplicas"],
        values["maxReplicas"],
    )
    assert (rules.target_running, rules.target_waiting) == (
        values["targetRunning"],
        values["targetWaiting"],
    )
    assert (rules.up_window_s, rules.down_window_s) == (
        values["scaleUpWindowSeconds"],
        values["scaleDownWindowSeconds"],
    )
    lines = (_HELM / "templates" / "_scaling.tpl").read_text().splitlines()
    policies = [yaml.safe_load(line)[0] for line in lines if "periodSeconds" in line]
    assert policies == [
        {"type": "Percent", "value": 100, "periodSeconds": POLICY_PERIOD_S},
        {"type": "Pods", "value": 1, "periodSeconds": POLICY_PERIOD_S},
        {"type": "Pods", "value": 1, "periodSeconds": POLICY_PERIOD_S},
    ]
    assert TOLERANCE == 0.1
