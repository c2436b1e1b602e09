"""Text that Prometheus scrapes, made from plain samples by its client library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    """A name that ends with ``_total`` is a counter's, any other a gauge's."""
    labels: Mapping[str, str]
    value: float


class _Samples(Collector):
    """Collector of samples that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(samples: Iterable[Sample], meanings: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Write samples in Prometheus' text format.

    Parameters
    ----------
    samples : in any order; those of one name have the same labels
    meanings : help text of each metric, by name
    labels : added to every sample
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, own_labels, value in samples:
        if name not in families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(name, meanings[name], labels=[*labels, *own_labels])
        families[name].add_metric([*labels.values(), *own_labels.values()], value)
    registry = CollectorRegistry()
    registry.register(_Samples(list(families.values())))
    return generate_latest(registry).decode()
