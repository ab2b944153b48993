"""Numbers kept for Prometheus, and the text of a scrape. Knows nothing of what they mean.

The client library's own objects take about 5 ms of the event loop for one scrape of a few hundred
series, and endpoint pickers scrape 20 times a second; so values are plain attributes, and the text
is put together from prepared prefixes (0.2 ms). Formats: Prometheus text 0.0.4, OpenMetrics 1.0.0.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate, product
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Spec(NamedTuple):
    """One metric. bounds: of a histogram's buckets, inclusive; others have none.

    labels: label -> its values known from the start, whose series exist at 0; () when none is.
    """

    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Counters are those whose name says so."""
        is_counter = self.name.endswith("_total")
        return "histogram" if self.bounds else "counter" if is_counter else "gauge"


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


class _Family:
    """A metric and its series, each with what stands before its numbers."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.series: dict[tuple[str, ...], Series] = {}
        self._lines: list[tuple[list[str], Series]] = []

    def get(self, values: tuple[str, ...]) -> Series:
        series = self.series.get(values)
        return self._add(values) if series is None else series

    def _add(self, values: tuple[str, ...]) -> Series:
        name, bounds = self.spec.name, self.spec.bounds
        labels = dict(zip(self.spec.labels, values, strict=True))
        if bounds:
            series: Series = Distribution(bounds)
            limits = [*(repr(float(bound)) for bound in bounds), "+Inf"]
            prefixes = [_prefix(f"{name}_bucket", {**labels, "le": limit}) for limit in limits]
            prefixes += [_prefix(f"{name}_count", labels), _prefix(f"{name}_sum", labels)]
        else:
            series, prefixes = Value(), [_prefix(name, labels)]
        self.series[values] = series
        self._lines.append((prefixes, series))
        return series

    def lines(self, title: str) -> list[str]:
        """title: the family's name in this format."""
        found = [f"# HELP {title} {self.spec.help}\n# TYPE {title} {self.spec.kind}\n"]
        for prefixes, series in self._lines:
            pairs = zip(prefixes, series.numbers(), strict=True)
            found += [f"{prefix}{number}\n" for prefix, number in pairs]
        return found


class Exposition:
    """All metrics of one process and their values. One thread writes and reads."""

    def __init__(self, specs: tuple[Spec, ...]) -> None:
        self._families = {spec.name: _Family(spec) for spec in specs}
        for family in self._families.values():
            for labels in product(*family.spec.labels.values()):
                family.get(labels)

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

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        modern = "application/openmetrics-text" in accept
        parts: list[str] = []
        for name, family in self._families.items():
            parts += family.lines(name.removesuffix("_total") if modern else name)
        if modern:
            parts.append("# EOF\n")
        return "".join(parts).encode(), OPENMETRICS if modern else CONTENT_TYPE


def _prefix(name: str, labels: dict[str, str]) -> str:
    inner = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{inner}}} " if inner else f"{name} "


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
