"""Numbers kept for Prometheus, and the text of a scrape. Knows nothing of what they mean.

The client library's own objects take about 5 ms of the event loop for one scrape of a few hundred
series, and endpoint pickers scrape 20 times a second; so values are plain attributes, the text is
put together from prepared prefixes (0.2 ms), and the library renders OpenMetrics only.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST


class Spec(NamedTuple):
    """One metric. kind: counter, gauge or histogram; bounds: of a histogram's buckets, inclusive.

    labels: label -> its values known from the start, whose series exist at 0; () when none is.
    """

    name: str
    kind: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    bounds: tuple[float, ...] = ()


class Value:
    """One series of a counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def numbers(self) -> tuple[float, ...]:
        return (self.value,)


class Distribution:
    """One series of a histogram. counts[i]: not above bounds[i], and the last one above all."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.sum += amount

    def numbers(self) -> tuple[float, ...]:
        """Buckets, count, sum."""
        buckets = list(accumulate(self.counts))
        return (*buckets, buckets[-1], self.sum)


Series = Value | Distribution


class _Line(NamedTuple):
    """Where one number stands: in the text after `prefix`, in a sample under name and labels."""

    prefix: str
    name: str
    labels: dict[str, str]


class _Family:
    """A metric and its series, each with the lines that its numbers fill."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.header = f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {spec.kind}\n"
        self.series: dict[tuple[str, ...], Series] = {}
        self.lines: list[tuple[list[_Line], Series]] = []

    def get(self, values: tuple[str, ...]) -> Series:
        series = self.series.get(values)
        return self._add(values) if series is None else series

    def _add(self, values: tuple[str, ...]) -> Series:
        name, bounds = self.spec.name, self.spec.bounds
        labels = dict(zip(self.spec.labels, values, strict=True))
        if bounds:
            series: Series = Distribution(bounds)
            limits = [floatToGoString(limit) for limit in (*bounds, inf)]  # type: ignore[no-untyped-call]
            lines = [_line(f"{name}_bucket", {**labels, "le": limit}) for limit in limits]
            lines += [_line(f"{name}_count", labels), _line(f"{name}_sum", labels)]
        else:
            series, lines = Value(), [_line(name, labels)]
        self.series[values] = series
        self.lines.append((lines, series))
        return series


class Exposition(Collector):
    """All metrics of one process and their values. One thread writes and reads."""

    def __init__(self, specs: tuple[Spec, ...]) -> None:
        self._families = {spec.name: _Family(spec) for spec in specs}
        for family in self._families.values():
            for labels in product(*family.spec.labels.values()):
                family.get(labels)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def value(self, name: str, *labels: str) -> Value:
        """The series of a counter or gauge; a new one is at 0."""
        series = self._families[name].get(labels)
        assert isinstance(series, Value), f"{name} is a histogram; this is a bug"
        return series

    def distribution(self, name: str, *labels: str) -> Distribution:
        """The series of a histogram; a new one is empty."""
        series = self._families[name].get(labels)
        assert isinstance(series, Distribution), f"{name} is no histogram; this is a bug"
        return series

    def collect(self) -> Iterator[Metric]:
        for family in self._families.values():
            spec = family.spec
            metric = Metric(spec.name.removesuffix("_total"), spec.help, spec.kind)
            for lines, series in family.lines:
                pairs = zip(lines, series.numbers(), strict=True)
                metric.samples += [Sample(line.name, line.labels, n) for line, n in pairs]
            yield metric

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self._registry), OPENMETRICS  # type: ignore[no-untyped-call]
        parts: list[str] = []
        for family in self._families.values():
            parts.append(family.header)
            for lines, series in family.lines:
                pairs = zip(lines, series.numbers(), strict=True)
                parts += [f"{line.prefix}{number}\n" for line, number in pairs]
        return "".join(parts).encode(), CONTENT_TYPE


def _line(name: str, labels: dict[str, str]) -> _Line:
    inner = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return _Line(f"{name}{{{inner}}} " if inner else f"{name} ", name, labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
