"""The HorizontalPodAutoscaler of the chart, as Kubernetes computes it.

Source: pkg/controller/podautoscaler of Kubernetes 1.31, replica_calculator.go
(calcPlainMetricReplicas) and horizontal.go (stabilizeRecommendationWithBehaviors,
convertDesiredReplicasWithBehaviorRate).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

SYNC_S = 15.0  # the controller computes the number of pods this often
TOLERANCE = 0.1  # it ignores a ratio that is this close to 1
POLICY_PERIOD_S = 60.0  # periodSeconds of all policies of the chart


def wanted_replicas(values: Sequence[float], missing: int, target: float, current: int) -> int:
    """Return the number of pods for one metric of the type Pods with an AverageValue.

    values: the metric of each ready pod, at least one. missing: pods without a metric, because they
    start. target: the average value to reach. current: the number of pods now.
    """
    ratio = fmean(values) / target
    if not missing:
        close = abs(1 - ratio) <= TOLERANCE
        return current if close else math.ceil(ratio * len(values))
    filled = [*values, *[target if ratio < 1 else 0.0] * missing]
    new_ratio = fmean(filled) / target
    if abs(1 - new_ratio) <= TOLERANCE or ratio < 1 < new_ratio or new_ratio < 1 < ratio:
        return current
    wanted = math.ceil(new_ratio * len(filled))
    return current if (new_ratio < 1) != (wanted < current) else wanted


@dataclass(slots=True)
class Autoscaler:
    """The rules of the chart's HPA (helm/values.yaml, autoscaling) and the state of the controller.

    The defaults are those of the chart. The number of pods at most doubles, or grows by one, in 60
    seconds; it falls by at most one in 60 seconds.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    target_running: float = 160.0
    target_waiting: float = 4.0
    up_window_s: float = 60.0
    down_window_s: float = 300.0
    _wanted: list[tuple[float, int]] = field(default_factory=list)  # earlier recommendations
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def desired(
        self,
        now_s: float,
        current: int,
        running: Sequence[float],
        waiting: Sequence[float],
        missing: int,
    ) -> int:
        """Return the number of pods from now on.

        running, waiting: the metrics of each ready pod. missing: pods that start.
        """
        if not running:
            return current  # without a metric the controller changes nothing
        self._wanted = self._wanted or [(now_s, current)]
        wanted = max(
            wanted_replicas(running, missing, self.target_running, current),
            wanted_replicas(waiting, missing, self.target_waiting, current),
        )
        up = min([wanted, *(n for at_s, n in self._wanted if at_s > now_s - self.up_window_s)])
        down = max([wanted, *(n for at_s, n in self._wanted if at_s > now_s - self.down_window_s)])
        self._wanted.append((now_s, wanted))
        chosen = self._limited(now_s, current, min(max(current, up), down))
        if chosen != current:
            self._changes.append((now_s, chosen - current))
        return chosen

    def _limited(self, now_s: float, current: int, wanted: int) -> int:
        """Apply the policies and the limits of the number of pods."""
        recent = sum(change for at_s, change in self._changes if at_s > now_s - POLICY_PERIOD_S)
        start = current - recent
        if wanted > current:
            return min(wanted, self.max_replicas, max(2 * start, start + 1, current))
        return max(wanted, self.min_replicas, min(start - 1, current))
